"""The configuration of one connector: what it accepts, what it refuses and in which words, and its documentation."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import pickle
import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_mori import _config
from trio_mori._config import KEYS, ConnectorConfig, Endpoint, format_endpoint, port_for, resolve_host
from trio_mori._endpoint import Purpose
from trio_mori._errors import ConfigError

deterministic = pytest.mark.deterministic
PURPOSES: tuple[Purpose, ...] = ("request_forwarding", "kv_transfer", "orchestrator")
DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "_warned", set())


def refused(**values: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_dict(values)
    return caught.value


@deterministic
def test_the_defaults_are_those_of_the_stock_connector_where_it_has_the_key() -> None:
    config = ConnectorConfig()
    stock = {
        "zmq_port": 50051,
        "role": "sender",
        "sender_host": None,
        "sender_zmq_port": None,
        "device_name": "",
        "memory_pool_size": 1024**3,
        "memory_pool_device": "cpu",
        "qp_per_transfer": 1,
        "post_batch_size": -1,
        "num_worker_threads": 1,
        "xgmi_num_streams": 64,
        "xgmi_num_events": 64,
        "stage_id": -1,
        "buffer_ttl_seconds": 300,
    }
    assert {key: value for key, value in attrs.asdict(config).items() if key in stock} == stock
    assert (config.host, config.backend_type) == ("127.0.0.1", "shm")
    assert ConnectorConfig.from_dict({}) == config


BAD_INTEGERS: tuple[object, ...] = (
    None,
    True,
    False,
    1.5,
    7.0,
    "7",
    "",
    [],
    {},
    b"7",
    float("nan"),
    10**5000,
    -(10**5000),
)


@pytest.mark.parametrize("key", ["zmq_port", "sender_zmq_port"])
def test_a_port_is_an_integer_that_a_socket_takes(key: str) -> None:
    for value in (70000, "50051", -1, True, 1.5, 65536, 10**5000):
        error = refused(**{key: value})
        assert (error.key, error.value, error.source) == (key, value, None)
        assert str(error).startswith(f"{key}: ")
        assert "65535" in str(error)


@deterministic
def test_only_an_address_to_dial_may_be_unknown() -> None:
    assert "from 0 to 65535" in str(refused(zmq_port=None))
    assert ConnectorConfig.from_dict({"sender_zmq_port": None, "sender_host": None}).sender_zmq_port is None


@deterministic
def test_only_a_listener_may_leave_its_port_to_the_system() -> None:
    assert ConnectorConfig(zmq_port=0).zmq_port == 0
    assert "from 1 to 65535" in str(refused(sender_zmq_port=0))


@deterministic
def test_a_port_in_quotes_is_told_to_leave_them_out() -> None:
    assert "leave out the quotes" in str(refused(zmq_port="50051"))


@pytest.mark.parametrize(
    "key",
    [
        "memory_pool_size",
        "qp_per_transfer",
        "num_worker_threads",
        "xgmi_num_streams",
        "xgmi_num_events",
        "codec_chunk_frames",
        "max_fetches_per_peer",
        "max_peers",
    ],
)
def test_a_count_is_a_positive_integer(key: str) -> None:
    for value in (0, -1, *BAD_INTEGERS):
        assert refused(**{key: value}).key == key


@pytest.mark.parametrize("key", ["stage_id", "post_batch_size", "replica", "rank", "busy_poll_us", "zmq_port"])
def test_nothing_but_an_integer_is_an_integer(key: str) -> None:
    for value in BAD_INTEGERS:
        assert refused(**{key: value}).key == key


@deterministic
def test_a_pool_has_at_least_a_page_and_whole_pages() -> None:
    assert ConnectorConfig(memory_pool_size=4096).memory_pool_size == 4096
    assert ConnectorConfig(memory_pool_size=4097).memory_pool_size == 8192
    assert "4096" in str(refused(memory_pool_size=4095))


@pytest.mark.parametrize(
    "key",
    [
        "buffer_ttl_seconds",
        "transfer_timeout_base",
        "peer_timeout",
        "heartbeat_interval",
        "acknowledge_timeout",
        "stock_pull_limit",
        "stock_keep",
    ],
)
def test_a_time_is_positive_and_finite(key: str) -> None:
    for value in (0, -1, -0.0, math.nan, math.inf, -math.inf, 10**400, "5", True):
        error = refused(**{key: value})
        assert error.key == key
        assert "seconds" in str(error)


@pytest.mark.parametrize("value", [None, "never"])
def test_payloads_never_expire_if_that_is_asked_for(value: object) -> None:
    config = ConnectorConfig.from_dict({"buffer_ttl_seconds": value})
    assert config.buffer_ttl_seconds is None
    assert config.ttl == math.inf
    assert ConnectorConfig(buffer_ttl_seconds=2).ttl == 2.0


@pytest.mark.parametrize("key", ["prepost_fraction", "guaranteed_fraction", "quarantine_fraction"])
def test_a_fraction_is_a_part_and_not_the_whole(key: str) -> None:
    for value in (0, 1, -0.1, 1.1, float("nan"), None, "0.5", True):
        assert refused(**{key: value}).key == key
    assert attrs.asdict(ConnectorConfig.from_dict({key: 0.5}))[key] == 0.5


@deterministic
def test_two_directions_cannot_both_keep_more_than_half() -> None:
    assert "at most 0.5" in str(refused(guaranteed_fraction=0.6))


@deterministic
def test_a_pull_of_a_stock_receiver_is_refused_before_it_frees_its_destination() -> None:
    assert "below 30" in str(refused(stock_pull_limit=30))


@deterministic
def test_a_pool_for_both_directions_has_a_page_for_each() -> None:
    assert ConnectorConfig(role="both", memory_pool_size=8192).memory_pool_size == 8192
    error = refused(role="both", memory_pool_size=4096)
    assert error.key == "memory_pool_size"
    assert "with role both; give at least 8192" in str(error)


@deterministic
def test_a_heartbeat_comes_twice_within_the_time_that_a_peer_has() -> None:
    assert ConnectorConfig(heartbeat_interval=1, peer_timeout=2).heartbeat_interval == 1.0
    error = refused(heartbeat_interval=1.1, peer_timeout=2)
    assert error.key == "heartbeat_interval"
    assert "peer_timeout 2" in str(error)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("role", "sendr", ["one of sender, receiver, both", "did you mean 'sender'?"]),
        ("role", "auto", ["one of sender, receiver, both"]),
        ("role", None, ["one of sender, receiver, both"]),
        ("backend_type", "rmda", ["shm, rdma, xgmi, cuda_ipc, auto", "did you mean 'rdma'?"]),
        ("backend_type", "cuda-ipc", ["did you mean 'cuda_ipc'?"]),
        ("backend_type", "nixl", ["shm, rdma, xgmi, cuda_ipc, auto (", "nixl is not part of this release"]),
        ("backend_type", "memory", ["handed to open_connector"]),
        ("memory_pool_device", "gpu", ["cpu, cuda or cuda:N", "named cuda too"]),
        ("memory_pool_device", "cuda:", ["cpu, cuda or cuda:N"]),
        ("memory_pool_device", "pool", ["cpu, cuda or cuda:N"]),
        ("payload_device", "gpu", ["pool, cpu, cuda or cuda:N", "named cuda too"]),
        ("fallback", "shm", ["one of none, host"]),
        ("memory_pool_device", "cuda:-1", ["cpu, cuda or cuda:N"]),
        ("memory_pool_device", 0, ["cpu, cuda or cuda:N"]),
    ],
)
def test_an_unknown_word_is_answered_with_the_known_ones(key: str, value: object, words: list[str]) -> None:
    message = str(refused(**{key: value}))
    for word in words:
        assert word in message


@deterministic
@pytest.mark.parametrize("path", ["share", "./share", "~/share"])
def test_a_share_directory_that_is_relative_is_refused_with_the_remedy(path: str) -> None:
    message = str(refused(share_directory=path))
    assert message.startswith(f"share_directory: '{path}' is not allowed; give the absolute path of a directory")
    assert "begin it with a slash" in message


@deterministic
def test_words_are_taken_in_any_case_as_the_stock_connector_takes_them() -> None:
    config = ConnectorConfig(role="Sender", backend_type="XGMI", memory_pool_device="CUDA:1", host="AUTO")
    assert (config.role, config.backend_type, config.host) == ("sender", "xgmi", "auto")
    assert config.memory_pool_device == "cuda:1"


@pytest.mark.parametrize(
    ("backend", "device", "remedy"), [("xgmi", "cpu", "cuda:N"), ("cuda_ipc", "cpu", "cuda:N"), ("shm", "cuda", "cpu")]
)
def test_an_engine_needs_a_pool_where_it_can_reach_it(backend: str, device: str, remedy: str) -> None:
    error = refused(backend_type=backend, memory_pool_device=device)
    assert (error.key, error.value) == ("memory_pool_device", device)
    assert f"backend_type {backend}" in str(error)
    assert remedy in str(error)


@pytest.mark.parametrize("host", ["auto", "*", "0.0.0.0", "::", "::1", "10.0.0.3", "fe80::1%eth0", "node-3.rack_1"])
def test_a_host_is_an_address_a_name_or_a_word(host: str) -> None:
    assert ConnectorConfig(host=host).host == host


@pytest.mark.parametrize(
    "host", ["", " ", "tcp://10.0.0.3", "10.0.0.3:50051", "[::1]", "10.0.0.300", "1.2.3", "a b", "-x", ":::", 7]
)
@pytest.mark.parametrize("key", ["host", "sender_host", "advertise_host"])
def test_what_is_no_host_is_refused_before_anything_listens(key: str, host: object) -> None:
    error = refused(**{key: host})
    assert error.key == key
    assert "IPv4 or IPv6 address" in str(error)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "::", "0:0::0"])
def test_peers_are_never_told_to_dial_everywhere(host: str) -> None:
    assert refused(advertise_host=host).key == "advertise_host"
    assert ConnectorConfig(advertise_host="auto").advertise_host is None


@deterministic
def test_a_receiver_knows_its_sender_when_it_knows_both_halves() -> None:
    assert ConnectorConfig(role="receiver").sender_endpoint is None
    assert ConnectorConfig(role="receiver", sender_host="10.0.0.3").sender_endpoint is None
    assert ConnectorConfig(role="receiver", sender_zmq_port=50051).sender_endpoint is None
    assert ConnectorConfig(sender_host="::1", sender_zmq_port=5).sender_endpoint == Endpoint("::1", 5)


@pytest.mark.parametrize("host", ["auto", "*", "0.0.0.0"])
def test_a_receiver_that_knows_only_auto_dials_loopback(host: str) -> None:
    endpoint = ConnectorConfig(sender_host=host, sender_zmq_port=50051).sender_endpoint
    assert endpoint is not None
    assert endpoint.address == "tcp://127.0.0.1:50051"


@deterministic
def test_the_environment_names_rdma_devices_only_where_the_configuration_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_0,mlx5_1")
    assert ConnectorConfig(backend_type="rdma").rdma_devices == "mlx5_0,mlx5_1"
    assert ConnectorConfig(backend_type="rdma", device_name="mlx5_7").rdma_devices == "mlx5_7"
    assert not caplog.records
    config = ConnectorConfig(backend_type="xgmi", memory_pool_device="cuda", device_name="mlx5_7")
    assert config.rdma_devices == ""
    assert [record.getMessage() for record in caplog.records] == [
        "device_name: 'mlx5_7' is ignored; xgmi uses no RDMA device"
    ]
    monkeypatch.delenv("MORI_RDMA_DEVICES")
    assert ConnectorConfig(backend_type="rdma").rdma_devices == ""


@deterministic
def test_a_fallback_that_a_backend_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fallback.*backend_type rdma.*drop it") as caught:
        ConnectorConfig(backend_type="rdma", fallback="host")
    assert caught.value.key == "fallback"


@deterministic
def test_a_fallback_to_what_is_used_anyway_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ConnectorConfig(backend_type="shm", fallback="host")
    assert ["fallback: 'host' is ignored" in record.getMessage() for record in caplog.records] == [True]


@deterministic
def test_an_unknown_key_is_kept_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"zmq_prt": 7, "initial_latents": [1], "codec_chunk_frames": 10}
    for _ in range(2):
        config = ConnectorConfig.from_dict(given)
    assert [record.getMessage() for record in caplog.records] == [
        "'zmq_prt' is no key of a connector; it stays in extra: did you mean 'zmq_port' or 'sender_zmq_port'?",
        "'initial_latents' is no key of a connector; it stays in extra",
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("trio_mori.config", logging.WARNING)}
    assert config.extra == given
    assert config.codec_chunk_frames == 10


@deterministic
def test_keys_that_others_read_are_known_and_suggested(caplog: pytest.LogCaptureFixture) -> None:
    ConnectorConfig.from_dict({"chunk_adapter": True, "initial_codec_chunk_frames": 4, "chunk_adaptor": True})
    assert [record.getMessage() for record in caplog.records] == [
        "'chunk_adaptor' is no key of a connector; it stays in extra: did you mean 'chunk_adapter'?"
    ]


@deterministic
def test_extra_is_what_was_given_and_cannot_be_changed() -> None:
    given = {"codec_chunk_frames": 10}
    config = ConnectorConfig.from_dict(given)
    given["codec_chunk_frames"] = 11
    assert config.extra == {"codec_chunk_frames": 10}
    with pytest.raises(TypeError):
        config.extra["codec_chunk_frames"] = 11  # type: ignore[index]


@deterministic
def test_a_configuration_travels_to_another_process_whole() -> None:
    config = ConnectorConfig.from_dict({"role": "both", "memory_pool_size": 8192, "codec_vocab_size": 7})
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), attrs.evolve(config)):
        assert twin == config
        assert twin.extra == config.extra
        assert hash(twin) == hash(config)


@pytest.mark.parametrize("mapping", [None, [], "zmq_port: 1", 7, {7: 1}, {None: 1}, {("a",): 1}])
def test_what_is_no_mapping_of_strings_is_refused(mapping: object) -> None:
    with pytest.raises(ConfigError):
        ConnectorConfig.from_dict(mapping)  # type: ignore[arg-type]


@deterministic
def test_an_error_says_where_the_value_stands() -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_dict({"zmq_port": 70000}, source="deploy.yaml", where="connectors.mori")
    assert str(caught.value).startswith("deploy.yaml: connectors.mori: zmq_port: 70000 is not allowed; give an integer")
    assert caught.value.source == "deploy.yaml"
    assert caught.value.__cause__ is None


@deterministic
def test_an_error_stays_short_whatever_the_value_is() -> None:
    for value in ("x" * 10**6, 10**100_000, ["x"] * 10**6):
        assert len(str(refused(zmq_port=value, role="both"))) < 300


@deterministic
def test_a_transfer_gets_five_seconds_more_for_each_full_hundred_megabytes() -> None:
    config = ConnectorConfig()
    hundred = 100 * 1024 * 1024
    assert [config.transfer_timeout(size) for size in (0, 1, hundred - 1, hundred, 2 * hundred - 1, 10 * hundred)] == [
        30,
        30,
        30,
        35,
        35,
        80,
    ]
    assert ConnectorConfig(transfer_timeout_base=1, transfer_timeout_per_100mb=0).transfer_timeout(10**12) == 1


@deterministic
def test_the_digest_is_that_of_the_configuration_and_of_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = ConnectorConfig.from_dict({"stage_id": 1, "peer_timeout": 30}).digest
    monkeypatch.setenv("MORI_RDMA_DEVICES", "mlx5_0")
    assert ConnectorConfig.from_dict({"peer_timeout": 30.0, "stage_id": 1, "codec_vocab_size": 7}).digest == digest
    assert re.fullmatch("[0-9a-f]{16}", digest)
    changed = {
        "role": "both",
        "host": "auto",
        "zmq_port": 1,
        "memory_pool_size": 4096,
        "rank": 1,
        "peer_timeout": 60,
    }
    digests = {ConnectorConfig.from_dict({"stage_id": 1, key: value}).digest for key, value in changed.items()}
    assert len(digests | {digest}) == len(changed) + 1


# What a YAML file or a caller may contain, and some of what only a caller can make.
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(5000).map(lambda digits: 10**digits)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=5)
    | st.dates()
    | st.sampled_from(["auto", "never", "both", "xgmi", "cuda", "::1", "10.0.0.1", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def outcome(junk: object) -> ConnectorConfig | ConfigError:
    """Any other exception ends the test."""
    try:
        return ConnectorConfig.from_dict(junk, source="deploy.yaml")  # type: ignore[arg-type]
    except ConfigError as error:
        return error


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12) | st.integers(), JUNK, max_size=6) | JUNK)
def test_junk_is_a_configuration_or_a_config_error(junk: object) -> None:
    result = outcome(junk)
    if isinstance(result, ConfigError):
        assert str(result).startswith("deploy.yaml: ")
        assert len(str(result)) < 500
    else:
        assert result == pickle.loads(pickle.dumps(result))
        assert result.digest == attrs.evolve(result).digest


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KEYS), JUNK)
def test_one_bad_value_is_refused_under_its_own_key(key: str, junk: object) -> None:
    result = outcome({key: junk})
    if isinstance(result, ConfigError):
        assert result.key in (key, "memory_pool_device", "heartbeat_interval")  # the last two: with another's default


# --- addresses and ports ---


@deterministic
def test_auto_listens_on_loopback_and_on_the_address_that_peers_are_told() -> None:
    found = resolve_host("auto")
    assert found.bind[0] == "127.0.0.1"
    assert found.advertise in found.bind
    assert len(set(found.bind)) == len(found.bind)
    assert resolve_host("auto", advertise="10.9.8.7").advertise == "10.9.8.7"


@pytest.mark.parametrize("host", ["10.0.0.3", "::1", "fe80::1%eth0"])
def test_an_explicit_address_is_listened_on_and_told_as_it_is(host: str) -> None:
    found = resolve_host(host)
    assert found.bind == (host,)
    assert found.advertise == host


@deterministic
def test_a_wildcard_listens_everywhere_and_tells_an_address() -> None:
    assert resolve_host("*").bind == ("0.0.0.0",)
    assert resolve_host("::").bind == ("::",)
    assert resolve_host("0.0.0.0").advertise not in ("0.0.0.0", "*")


@deterministic
def test_a_name_is_told_as_it_is_and_listened_on_by_its_address() -> None:
    found = resolve_host("localhost")
    assert found.bind in (("127.0.0.1",), ("::1",))
    assert found.advertise == "localhost"


@deterministic
def test_a_name_without_an_address_is_refused_by_name() -> None:
    name = "x" * 64  # longer than a label may be: refused without asking anybody
    with pytest.raises(ConfigError, match=f"host: '{name}' has no address") as caught:
        resolve_host(name)
    assert isinstance(caught.value.__cause__, UnicodeError)


@deterministic
def test_an_ipv6_address_is_dialled_in_brackets() -> None:
    assert format_endpoint("::1", 50051) == "tcp://[::1]:50051"
    assert format_endpoint("fe80::1%eth0", 1) == "tcp://[fe80::1%eth0]:1"
    assert format_endpoint("127.0.0.1", 50051) == "tcp://127.0.0.1:50051"
    assert format_endpoint("node-3", 50051) == "tcp://node-3:50051"


@deterministic
def test_ports_follow_the_arithmetic_of_vllm_omni() -> None:
    assert port_for(50051, stage=0) == 50051
    assert port_for(50051, stage=2) == 50053
    assert port_for(50051, purpose="kv_transfer", stage=1, rank=2, replica=3) == 50051 + 100 + 3 * 1024 + 2 * 16 + 1
    assert port_for(50051, purpose="orchestrator", stage=1) == 50252


def all_ports(places: list[tuple[int, int]], replicas: int = 3) -> list[int]:
    return [
        port_for(50051, purpose=purpose, stage=stage, rank=rank, replica=replica)
        for purpose, replica, (stage, rank) in itertools.product(PURPOSES, range(replicas), places)
    ]


@pytest.mark.parametrize(
    "places",
    [
        [(stage, rank) for stage in range(16) for rank in range(6)],
        [(stage, rank) for stage in range(4) for rank in range(51)],
        [(stage, rank) for stage in range(8) for rank in range(51 if stage < 4 else 6)],
    ],
    ids=["16 stages, 6 ranks", "4 stages, 51 ranks", "8 stages, both"],
)
def test_no_two_purposes_replicas_ranks_and_stages_share_a_port(places: list[tuple[int, int]]) -> None:
    ports = all_ports(places)
    assert len(set(ports)) == len(ports) == 9 * len(places)


@deterministic
def test_more_than_eight_stages_and_more_than_six_ranks_would_share_a_port() -> None:
    """Each is fine alone; the arithmetic of vllm-omni does not allow for both, and one connector cannot see it."""
    assert port_for(50051, stage=0, rank=7) == port_for(50051, purpose="kv_transfer", stage=12, rank=0)


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("stage_id", {"stage": 16}),
        ("stage_id", {"stage": -1}),
        ("stage_id", {"stage": True}),
        ("rank", {"stage": 4, "rank": 6}),
        ("rank", {"stage": 0, "rank": 51}),
        ("rank", {"stage": 0, "rank": -1}),
        ("replica", {"stage": 0, "replica": -1}),
        ("replica", {"stage": 0, "replica": 64}),
        ("purpose", {"stage": 0, "purpose": "kv"}),
    ],
)
def test_a_port_that_another_could_have_is_refused(key: str, parts: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        port_for(50051, **parts)  # type: ignore[arg-type]
    assert caught.value.key == key


@deterministic
def test_a_port_above_the_last_one_is_refused_with_all_its_parts() -> None:
    with pytest.raises(ConfigError) as caught:
        port_for(65000, purpose="kv_transfer", stage=3, rank=2, replica=1)
    assert str(caught.value) == (
        "zmq_port 65000, purpose 'kv_transfer', stage 3, rank 2, replica 1: the port would be 66159, above 65535; "
        "give a zmq_port of at most 64376"
    )
    assert port_for(64376, purpose="kv_transfer", stage=3, rank=2, replica=1) == 65535


@deterministic
def test_ephemeral_ports_follow_no_arithmetic() -> None:
    with pytest.raises(ConfigError, match="zmq_port has to be an integer from 1 to 65535"):
        port_for(0, stage=0)


# --- the documentation ---


def table() -> str:
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for field in attrs.fields(ConnectorConfig):
        if field.name in KEYS:
            default = {None: "null", "": '""'}.get(field.default, field.default)
            default = f"{default:g}" if isinstance(default, float) else default
            lines.append(f"| `{field.name}` | {default} | {field.metadata['allowed']} | {field.metadata['meaning']} |")
    return "\n".join(lines)


@deterministic
def test_the_documented_table_is_that_of_the_class() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8"), f"docs/configuration.md wants this table:\n{table()}"


@deterministic
@pytest.mark.parametrize(
    ("given", "meant"),
    [("512MB", 536870912), ("512 mb", 536870912), ("1G", 2**30), ("1.5GiB", 3 * 2**29), ("64k", 65536)],
)
def test_a_size_with_a_unit_is_answered_with_its_bytes(given: str, meant: int) -> None:
    assert f"(write {meant} for {given})" in str(refused(memory_pool_size=given))
    assert "write" not in str(refused(zmq_port=given))


@deterministic
def test_a_misspelt_argument_is_answered_with_the_key_that_it_resembles() -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig(zmq_prot=1)  # type: ignore[call-arg]
    error = caught.value
    assert error.key == "zmq_prot"
    assert "zmq_prot: it is no key of a connector; did you mean 'zmq_port'" in str(error)
    with pytest.raises(ConfigError, match=r"vocabulary: it is no key of a connector; .* from_dict"):
        ConnectorConfig(vocabulary=1)  # type: ignore[call-arg]
