"""One stage process, started by the parent: takes its order from stdin, opens its connector, reports on stdout.

python -m examples.pipeline.process 1           stage 1
python -m examples.pipeline.process compare     all three stages at once, without connectors
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import trio
from torch import Tensor

import trio_mori
from examples.pipeline.messages import (
    Compared,
    Count,
    Done,
    Failed,
    Finished,
    Listening,
    Order,
    Progress,
    Request,
    keep_stdout,
    tell,
)
from examples.pipeline.models import FRAME, SAMPLE_RATE, run_in_one_process
from examples.pipeline.stages import CHUNK_TYPES, Code2WavStage, Handoffs, Stage, TalkerStage, ThinkerStage
from examples.pipeline.wav import WavError, read_wav, resample, wav_bytes

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


def sounds(order: Order) -> list[Tensor]:
    """What the requests say: the recording, each time at another pitch."""
    samples, rate = read_wav(Path(order.recording))
    return [resample(samples, rate * 2 ** (request.semitones / 12), SAMPLE_RATE) for request in order.requests]


def config_of(number: int, order: Order) -> trio_mori.ConnectorConfig:
    """A stage's part of the deploy file, with ports that nobody else has unless they are to be fixed."""
    deploy = trio_mori.load_deploy(order.deploy)
    gpu: dict[str, object] = {}
    if order.devices:
        gpu = {"backend_type": "cuda_ipc", "memory_pool_device": order.devices[number]}
    if order.fixed_ports:
        return deploy.config_for_stage(number, **gpu)
    return deploy.config_for_stage(number, zmq_port=0, sender_zmq_port=order.sender_port, **gpu)


def make_stage(number: int, order: Order, config: trio_mori.ConnectorConfig) -> Stage:
    """Load the stage's model, and at the first stage the recording, before the connector is opened."""
    device = config.memory_pool_device if order.devices else "cpu"
    if number == 0:
        inputs = {request.id: samples for request, samples in zip(order.requests, sounds(order), strict=True)}
        tell(Progress(0, total=sum(-(-len(samples) // FRAME) + 1 for samples in inputs.values())))
        return ThinkerStage(inputs, speed=order.speed, device=device)
    if number == 1:
        frames, context = config.codec_chunk_frames, config.codec_left_context_frames
        return TalkerStage(frames=frames, context=context, device=device)
    return Code2WavStage(device=device)


async def run_stage(stage: Stage, config: trio_mori.ConnectorConfig, requests: list[Request]) -> None:
    """Open the connector, handle all requests at the same time, and stay until the parent says that all are done."""
    async with (
        trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as parent,
        trio_mori.open_connector(config, payload_types=CHUNK_TYPES) as conn,
    ):
        tell(Listening(conn.get_connection_info()["zmq_port"]))
        await parent.receive_some()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_at_the_end_of, parent, nursery.cancel_scope)
            async with trio.open_nursery() as handlers:
                for request in requests:
                    handlers.start_soon(stage.handle, conn, request)
            tell(Done())
        tell(finished(conn, stage.handoffs))


async def cancel_at_the_end_of(parent: trio.abc.ReceiveStream, scope: trio.CancelScope) -> None:
    """The parent closes our stdin when all stages are done; the system does when the parent has died."""
    while await parent.receive_some():
        pass
    scope.cancel()


def finished(conn: trio_mori.Connector, handoffs: Handoffs) -> Finished:
    """What passed through this stage, as its connector counted it."""
    statistics = conn.statistics()
    return Finished(
        pid=statistics.pid,
        engine=statistics.engine,
        written=statistics.events.get("out_delivered", 0),
        put={edge: Count(count.payloads, count.bytes) for edge, count in statistics.put.items()},
        got={edge: Count(count.payloads, count.bytes) for edge, count in statistics.got.items()},
        latencies=handoffs.latencies,
        first_sent=handoffs.first_sent,
        last_arrived=handoffs.last_arrived,
    )


async def until_signalled(stage: Stage, config: trio_mori.ConnectorConfig, requests: list[Request]) -> None:
    """Run a stage; SIGINT and SIGTERM end it as any cancellation does, with everything closed."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(exit_on_signal)
        await run_stage(stage, config, requests)
        nursery.cancel_scope.cancel()


async def exit_on_signal() -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            sys.exit(128 + number)


def compare(order: Order) -> None:
    """Run the same functions without processes and connectors; say which of the stages' files differ from that."""
    config = config_of(1, order)
    different = []
    for request, samples in zip(order.requests, sounds(order), strict=True):
        sound = run_in_one_process(
            samples, config.codec_chunk_frames, config.codec_left_context_frames, *order.devices[:1]
        )
        if Path(request.out).read_bytes() != wav_bytes(sound, SAMPLE_RATE):
            different.append(request.out)
    tell(Compared(different))


def carry_out(role: str, order: Order) -> None:
    """Be a stage, or all of them."""
    if role == "compare":
        compare(order)
    else:
        config = config_of(int(role), order)
        trio.run(until_signalled, make_stage(int(role), order, config), config, order.requests)


def main() -> None:
    """Take the order and carry it out. What fails is told to the parent, which shows it."""
    keep_stdout()
    torch.set_num_threads(1)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        carry_out(sys.argv[1], order)
    except BaseException as error:  # noqa: BLE001  here it leaves the process: the parent shows it
        cause = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, SystemExit):
            raise cause from None
        if order.traceback:
            traceback.print_exception(error)
        with suppress(BrokenPipeError):  # the parent has died, and that is why we end
            message = str(cause) if isinstance(cause, WavError) else f"{type(cause).__name__}: {cause}".rstrip(": ")
            tell(Failed(message, echo=isinstance(cause, trio_mori.StreamFailed | trio_mori.PeerLost)))
        sys.exit(1)


if __name__ == "__main__":
    main()
