"""Role, ports and sender of a stage's connector, by what vllm-omni 0.30 resolves for each stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio_mori_vllm_omni
from trio_mori_vllm_omni._place import CLOSE_GRACE, find_place

from trio_mori import ConfigError, load_deploy

pytestmark = pytest.mark.deterministic

# As resolve_3stage.py of the stock wheel prints them for deploy/qwen3_omni_moe_mori_intranode.yaml.
BACKEND = {"backend_type": "shm", "memory_pool_size": 1 << 20}
STOCK = (
    {"role": "sender", "stage_id": 0, "from_stage": 0, "to_stage": 1, "host": "auto", "zmq_port": 50051, **BACKEND},
    {"role": "receiver", "stage_id": 1, "from_stage": 0, "to_stage": 1, "host": "auto", "sender_host": "auto"}
    | {"sender_zmq_port": 50051, **BACKEND},
    {"role": "receiver", "stage_id": 2, "from_stage": 1, "to_stage": 2, "host": "auto", "sender_host": "auto"}
    | {"sender_zmq_port": 50052, **BACKEND},
)
OWN = tuple(
    {"role": role, "stage_id": stage, "host": "auto", "zmq_port": 50051, **BACKEND}
    for stage, role in enumerate(("sender", "receiver", "receiver"))
)


@pytest.mark.parametrize(("extras", "resolved"), [(STOCK, True), (OWN, False)])
def test_each_stage_of_three_listens_where_the_next_one_asks(
    extras: tuple[dict[str, object], ...], resolved: bool
) -> None:
    places = [find_place(extra, resolved=resolved) for extra in extras]
    assert [p.config.zmq_port for p in places] == [50051, 50052, 50053]
    assert [p.config.role for p in places] == ["sender", "both", "both"]
    assert all(p.can_put for p in places)
    assert [(p.sender_host, p.sender_zmq_port) for p in places] == [(None, None), ("auto", 50051), ("auto", 50052)]


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (1, 0), (0, 1), (3, 2)])
def test_both_names_lead_to_the_same_ports_for_every_rank_and_replica(rank: int, replica: int) -> None:
    offset = 16 * rank + 1024 * replica
    for stock, own in zip(STOCK, OWN, strict=True):
        resolved = dict(stock)
        key = "zmq_port" if stock["role"] == "sender" else "sender_zmq_port"
        resolved[key] = int(str(stock[key])) + offset
        one = find_place(resolved, resolved=True, rank=rank, replica=replica)
        other = find_place(own, resolved=False, rank=rank, replica=replica)
        assert (one.config.zmq_port, one.sender_zmq_port) == (other.config.zmq_port, other.sender_zmq_port)


def test_no_two_stages_ranks_and_replicas_share_a_port() -> None:
    ports = [
        find_place({**OWN[1], "stage_id": stage}, resolved=False, rank=rank, replica=replica).config.zmq_port
        for stage in range(3)
        for rank in range(8)
        for replica in range(4)
    ]
    assert len(set(ports)) == len(ports) == 96


@pytest.mark.parametrize(
    ("extra", "resolved"),
    [({**OWN[1], "zmq_port": 65535}, False), ({**STOCK[1], "sender_zmq_port": 65535}, True)],
)
def test_a_port_above_65535_is_an_error_that_names_its_key(extra: dict[str, object], resolved: bool) -> None:
    with pytest.raises(ConfigError, match=r"zmq_port") as refusal:
        find_place(extra, resolved=resolved)
    assert "65535" in str(refusal.value) or "65536" in str(refusal.value)


def test_the_ports_of_a_kv_sender_are_those_that_vllm_omni_computed() -> None:
    extra = {"role": "sender", "from_stage": "1", "to_stage": "2", "zmq_port": 50152, "host": "127.0.0.1", **BACKEND}
    place = find_place(extra, resolved=True)
    assert (place.config.zmq_port, place.config.role, place.config.from_stage) == (50152, "sender", 1)


def test_a_receiver_outside_of_a_deployment_only_receives() -> None:
    extra = {"role": "receiver", "sender_host": "10.0.0.3", "sender_zmq_port": 50051, **BACKEND}
    for resolved in (True, False):
        place = find_place(extra, resolved=resolved)
        assert not place.can_put
        assert place.config.role == "receiver"
        assert (place.sender_host, place.sender_zmq_port) == ("10.0.0.3", 50051)


def test_a_kv_receiver_waits_to_be_told_its_sender() -> None:
    extra = {"role": "receiver", "from_stage": "0", "to_stage": "1", "zmq_port": 50051, "host": "auto", **BACKEND}
    place = find_place(extra, resolved=True)
    assert not place.can_put
    assert place.sender_zmq_port is None


def test_the_backend_is_stock_s_under_the_stock_name_and_shared_memory_under_our_own() -> None:
    assert find_place({"role": "sender", "zmq_port": 1}, resolved=True).config.backend_type == "rdma"
    assert find_place({"role": "sender", "zmq_port": 1}, resolved=False).config.backend_type == "shm"


def test_closing_is_short_unless_the_configuration_says_otherwise() -> None:
    assert find_place(OWN[0], resolved=False).config.close_grace == CLOSE_GRACE
    assert find_place({**OWN[0], "close_grace": 7}, resolved=False).config.close_grace == 7


def test_a_port_may_be_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE_PORT", "51000")
    assert find_place({**OWN[1], "zmq_port": "${BASE_PORT}"}, resolved=False).config.zmq_port == 51001
    monkeypatch.delenv("BASE_PORT")
    with pytest.raises(ConfigError, match=r"zmq_port: '\$\{BASE_PORT\}' is not allowed"):
        find_place({**OWN[1], "zmq_port": "${BASE_PORT}"}, resolved=False)


@pytest.mark.parametrize(
    ("key", "value"), [("role", "middle"), ("stage_id", True), ("zmq_port", 1.5), ("memory_pool_size", 0)]
)
def test_a_wrong_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        find_place({**OWN[0], key: value}, resolved=False)
    assert refusal.value.key == key


def test_two_instances_of_one_configuration_are_equal_and_other_stages_are_not() -> None:
    one, same, other = (find_place(extra, resolved=False).config for extra in (OWN[1], dict(OWN[1]), OWN[2]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_an_explicit_sender_wins() -> None:
    extra = {**OWN[1], "sender_host": "10.0.0.3", "sender_zmq_port": 6000}
    place = find_place(extra, resolved=False)
    assert (place.sender_host, place.sender_zmq_port) == ("10.0.0.3", 6000)


DEPLOY = Path(trio_mori_vllm_omni.__file__).parent / "deploy"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_deploy_files_of_ours_are_allowed_and_connect_their_stages(path: Path) -> None:
    deploy = load_deploy(path)
    configs = [deploy.config_for_stage(stage) for stage in range(3)]
    assert [config.role for config in configs] == ["sender", "both", "receiver"]
    assert [config.sender_zmq_port for config in configs] == [None, configs[0].zmq_port, configs[1].zmq_port]
    assert {config.memory_pool_size for config in configs} == {512 << 20}
    for stage, role in enumerate(("sender", "receiver", "receiver")):  # as vllm-omni hands them over
        extra = {**configs[stage].extra, "role": role, "stage_id": stage, "zmq_port": 50051}
        extra = {key: value for key, value in extra.items() if key not in ("sender_host", "sender_zmq_port")}
        place = find_place(extra, resolved=False)
        assert (place.config.zmq_port, place.sender_zmq_port) == (50051 + stage, 50050 + stage if stage else None)
        assert place.config.backend_type == configs[stage].backend_type


def test_there_are_deploy_files_for_both_makes_of_gpu() -> None:
    assert [path.stem for path in sorted(DEPLOY.glob("*.yaml"))] == ["qwen3_omni_moe_mi300x", "qwen3_omni_moe_nvidia"]
