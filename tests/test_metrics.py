"""Connectors as Prometheus sees them: what they say of themselves, whatever thread asks, and without long waits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
from ports import free_port
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rig import LIMIT, POOL, UNIT, filled, open_pair, port_of, receiver_config, sender_config

from trio_mori import Misuse, NotReady, blocking, metrics
from trio_mori._connector import Connector
from trio_mori.metrics import ConnectorCollector

DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana.json"


class Scrape:
    """What Prometheus would have read."""

    def __init__(self, collector: ConnectorCollector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        text = generate_latest(registry).decode()
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """One sample."""
        return self.samples[f"trio_mori_{name}", frozenset(labels.items())]

    def names(self) -> set[str]:
        """Of the metrics that have samples."""
        return {name for name, _ in self.samples}


async def scrape(collector: ConnectorCollector) -> Scrape:
    """Read in another thread, as a server of metrics does."""
    return await trio.to_thread.run_sync(Scrape, collector)


async def test_what_a_connector_says_of_itself_is_what_prometheus_reads() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair:
        with collector.watching(pair.sender, "up"), collector.watching(pair.receiver, "down"):
            await pair.put("a", filled(1000))
            await pair.put("b", filled(500))
            await pair.get("a")
            found = await scrape(collector)
    assert found.value("up", connector="up") == found.value("up", connector="down") == 1
    assert found.value("degraded", connector="up") == 0
    assert found.value("payloads_total", connector="up", direction="put", edge="0_1") == 2
    assert found.value("bytes_total", connector="up", direction="put", edge="0_1") == 1500
    assert found.value("payloads_total", connector="down", direction="got", edge="0_1") == 1
    assert found.value("pool_bytes", connector="up", state="published") == UNIT
    states = [value for (name, labels), value in found.samples.items() if name == "trio_mori_pool_bytes"]
    assert sum(states) == 2 * POOL
    assert found.value("events_total", connector="down", event="in_acknowledged") == 1
    assert found.value("peers", connector="up") == 1


async def test_quarantine_is_read_by_peer_and_reason() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair, trio.open_nursery() as nursery:
        with collector.watching(pair.receiver, "down"):
            outcome = await pair.hold_one(nursery, "k", filled(3 * UNIT))
            outcome.scope.cancel()
            await outcome.over.wait()
            found = await scrape(collector)
            [(labels, size)] = [
                (dict(labels), value)
                for (name, labels), value in found.samples.items()
                if name == "trio_mori_quarantine_bytes"
            ]
            assert size == pair.receiver.health()["quarantined"]
            assert labels["peer"] == f"tcp://127.0.0.1:{port_of(pair.sender)}"
            assert found.value("degraded", connector="down") == 1
            assert found.value("quarantine_seconds", connector="down") >= 0
            pair.sender_engine.release()


async def test_a_connector_is_watched_for_the_length_of_a_block_and_under_one_name() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair:
        with collector.watching(pair.sender, "stage"):
            with (
                pytest.raises(ValueError, match="'stage' is watched already"),
                collector.watching(pair.receiver, "stage"),
            ):
                raise AssertionError
            assert Scrape(collector).value("up", connector="stage") == 1, "from its own loop, too"
        assert Scrape(collector).samples == {}
        with collector.watching(pair.receiver, "stage"):
            assert (await scrape(collector)).value("up", connector="stage") == 1


async def test_a_loop_that_does_not_answer_is_down_and_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TIMEOUT", 0.05)
    collector = ConnectorCollector()
    stuck = threading.Event()
    found: list[Scrape] = []

    def read() -> None:
        found.append(Scrape(collector))
        stuck.set()

    async with open_pair() as pair:
        with collector.watching(pair.sender, "stage"):
            threading.Thread(target=read).start()
            assert stuck.wait(LIMIT), "this loop runs nothing meanwhile"
            assert found[0].value("up", connector="stage") == 0
            assert found[0].names() == {"trio_mori_up"}
            assert (await scrape(collector)).value("up", connector="stage") == 1


def test_blocking_connectors_are_watched_from_any_thread_until_they_are_closed() -> None:
    collector = ConnectorCollector()
    pool = {"memory_pool_size": 1 << 20}
    with blocking.open_connector({**sender_config(), **pool}) as sender:
        port = sender.get_connection_info()["zmq_port"]
        with blocking.open_connector({**receiver_config(port), **pool}) as receiver:
            with collector.watching(sender, "up"), collector.watching(receiver, "down"):
                sender.put("0", "1", "k", b"hello")
                receiver.get("0", "1", "k", timeout=LIMIT)
                found = Scrape(collector)
                assert found.value("bytes_total", connector="down", direction="got", edge="0_1") == 5
                receiver.close()
                found = Scrape(collector)
                assert (found.value("up", connector="up"), found.value("up", connector="down")) == (1, 0)


def test_a_loop_that_is_over_is_down() -> None:
    collector = ConnectorCollector()

    async def main() -> None:
        async with open_pair() as pair:
            watching.append(collector.watching(pair.sender, "stage"))
            watching[0].__enter__()

    watching: list[object] = []
    trio.run(main)
    assert Scrape(collector).value("up", connector="stage") == 0


def test_a_trio_connector_is_watched_where_it_lives() -> None:
    connectors: list[Connector] = []

    async def main() -> None:
        async with open_pair() as pair:
            connectors.append(pair.sender)

    trio.run(main)
    with pytest.raises(Misuse, match="where it was opened"), ConnectorCollector().watching(connectors[0], "stage"):
        raise AssertionError


def test_without_the_library_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "try:\n    import trio_mori.metrics\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install prometheus-client" in done.stdout


async def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair, trio.open_nursery() as nursery:
        with collector.watching(pair.sender, "up"), collector.watching(pair.receiver, "down"):
            await pair.put("a", filled(1000))
            await pair.get("a")
            outcome = await pair.hold_one(nursery, "k", filled(10))
            outcome.scope.cancel()
            await outcome.over.wait()
            found = await scrape(collector)
            pair.sender_engine.release()
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) >= 10
    names = {name for expression in asked for name in re.findall(r"trio_mori_\w+", expression)}
    assert names <= found.names()
    assert found.names() - names == set(), "all are shown"


async def test_the_dashboard_asks_by_labels_that_exist_for_every_event_that_is_worth_watching() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair:
        with collector.watching(pair.sender, "up"), collector.watching(pair.receiver, "down"):
            await pair.put("a", filled(10))
            await pair.get("a")
            found = await scrape(collector)
    labels: dict[str, set[str]] = {"trio_mori_quarantine_bytes": {"connector", "peer", "reason"}}
    for name, pairs in found.samples:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for target in (target for panel in panels for target in panel["targets"]):
        names = re.findall(r"trio_mori_\w+", target["expr"])
        asked = re.findall(r"{{(\w+)}}", target["legendFormat"]) + re.findall(r"[{ ](\w+)=", target["expr"])
        assert all(set(asked) <= labels[name] for name in names), target
    [shown] = re.findall(r'event=~"([^"]+)"', " ".join(t["expr"] for panel in panels for t in panel["targets"]))
    counted = {dict(pairs)["event"] for name, pairs in found.samples if name == "trio_mori_events_total"}
    assert set(shown.split("|")) <= counted
    text = (DASHBOARD.parent / "operations.md").read_text(encoding="utf-8")
    rows = text.partition("| event | what it counts |")[2].partition("\n\n")[0]
    told = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert len(told) >= 8
    assert told <= set(shown.split("|"))


async def test_every_counter_and_state_is_always_there_and_in_the_page() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair:
        with collector.watching(pair.sender, "up"), collector.watching(pair.receiver, "down"):
            before = await scrape(collector)
            await pair.put("a", filled(1000))
            between = await scrape(collector)
            await pair.get("a")
            after = await scrape(collector)
    for name, label, header in (("events_total", "event", "counter"), ("pool_bytes", "state", "state")):
        seen = [
            {labels for found, labels in each.samples if found == f"trio_mori_{name}"} for each in (before, between)
        ]
        assert seen[0] == seen[1] == {labels for found, labels in after.samples if found == f"trio_mori_{name}"}
        page = (DASHBOARD.parent / "operations.md").read_text(encoding="utf-8")
        [table] = re.findall(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
        told = {each for row in table.splitlines() for each in re.findall(r"`(\w+)`", row.split("|")[1])}
        assert told == {dict(labels)[label] for labels in seen[0]}
    assert between.value("pool_bytes", connector="up", state="published") == UNIT
    assert after.value("pool_bytes", connector="up", state="published") == 0


async def test_a_sender_is_connected_or_not_once_something_was_asked_of_it() -> None:
    collector = ConnectorCollector()
    async with open_pair() as pair:
        peer = f"tcp://127.0.0.1:{port_of(pair.sender)}"
        with collector.watching(pair.receiver, "down"):
            assert "trio_mori_sender_connected" not in (await scrape(collector)).names()
            await pair.put("a", filled(10))
            await pair.get("a")
            assert (await scrape(collector)).value("sender_connected", connector="down", peer=peer) == 1
            pair.receiver.update_sender_info("127.0.0.1", free_port())
            with pytest.raises(NotReady):
                pair.get_nowait("a")
            found = await scrape(collector)
            assert found.value("sender_connected", connector="down", peer=peer) == 1
            assert sum(value for (name, _), value in found.samples.items() if name.endswith("sender_connected")) == 1
            assert found.value("waiting_gets", connector="down") == 1
