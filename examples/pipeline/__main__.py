"""The command: `python -m examples.pipeline`, or `make demo`. Reads the arguments, prints the result."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path

from examples.pipeline.messages import Order, Request

HERE = Path(__file__).parent
SEMITONES = (0, 3, -3, 5, -5, 7, -7)  # how requests differ, repeating after seven
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.pipeline",
        description="Sends a recording through three stage processes (Thinker, Talker, Code2Wav), several requests at "
        "a time, and checks that what comes out is bit for bit what the same functions give in one process.",
        epilog="Exit status: 0 if it is, 1 if it is not or a stage failed, 2 for wrong arguments, 130 after Ctrl-C.",
    )
    parser.add_argument(
        "--wav",
        type=Path,
        default=HERE / "recording.wav",
        metavar="FILE",
        help="the recording: mono or stereo, any rate, 8 to 32 bit PCM or float (default: a short one of ours)",
    )
    parser.add_argument(
        "--requests", type=int, default=4, metavar="N", help="how many at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE.parent / "out" / "pipeline.wav",
        metavar="FILE",
        help="where the sound of the first request goes; that of the others goes beside it (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=4.0,
        metavar="X",
        help="feed the recording in at X times real time, as a model that speaks would; 0: as fast as it goes "
        "(default: %(default)g)",
    )
    parser.add_argument(
        "--deploy",
        type=Path,
        default=HERE / "pipeline.yaml",
        metavar="FILE",
        help="the deploy file that wires the stages (default: %(default)s)",
    )
    parser.add_argument(
        "--fixed-ports",
        action="store_true",
        help="listen on the ports of the deploy file; otherwise on free ones, so that two demos do not meet",
    )
    parser.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        default=[],
        metavar="GPU,GPU,GPU",
        help="where the stages compute and have their pools, for example cuda:0,cuda:1,cuda:0; the hidden states and "
        "codec frames then go from GPU to GPU (default: as the deploy file says)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of a stage that fails")
    options = parser.parse_args(arguments)
    if options.requests < 1:
        parser.error(f"--requests {options.requests}: at least 1 is needed")
    if options.devices and len(options.devices) != 3:
        parser.error(f"--devices {','.join(options.devices)}: one for each of the three stages is needed")
    if not 0 <= options.speed < math.inf:
        parser.error(f"--speed {options.speed}: a number from 0 up is needed")
    for file in (options.wav, options.deploy):
        if not file.is_file():
            parser.error(f"{file}: no such file")
    return options


def order_from(options: argparse.Namespace) -> Order:
    """What the options ask for. The folder of the output exists afterwards."""
    out: Path = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    requests = [
        Request(
            id=f"request-{number}",
            semitones=SEMITONES[number % len(SEMITONES)],
            out=str(out if number == 0 else out.with_name(f"{out.stem}-{number}{out.suffix}")),
        )
        for number in range(options.requests)
    ]
    return Order(
        deploy=str(options.deploy.absolute()),
        recording=str(options.wav.absolute()),
        requests=requests,
        speed=options.speed,
        fixed_ports=options.fixed_ports,
        traceback=options.traceback,
        devices=options.devices,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the demo takes over, Ctrl-C just ends this, with no traceback
    order = order_from(parse(arguments))

    import trio

    from examples.pipeline.demo import Demo
    from examples.pipeline.report import table

    demo = Demo(order)
    trio.run(demo.run)
    if demo.interrupted:
        print("interrupted; all stages are closed", file=sys.stderr)
        return INTERRUPTED
    if demo.failure is not None:
        print(demo.failure, file=sys.stderr)
        return 1
    print(table(demo.results()))
    for request in order.requests:
        print(f"{request.id}: {request.out}")
    for file in demo.different or ():
        print(f"not what one process makes: {file}")
    print(f"bit-identical: {'no' if demo.different else 'yes'}")
    return 1 if demo.different else 0


if __name__ == "__main__":
    sys.exit(main())
