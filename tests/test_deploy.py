"""Deploy files: which connector a stage gets, and what the errors of a file say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trio_mori import _config
from trio_mori._config import KEYS, ConnectorConfig
from trio_mori._deploy import DeployFile, Edge, load_deploy
from trio_mori._errors import ConfigError

deterministic = pytest.mark.deterministic

CHAIN = """\
async_chunk: true
trust_remote_code: false

connectors:
  fabric:
    name: MoriTransferEngineConnector
    extra:
      host: auto
      zmq_port: 41000
      backend_type: xgmi
      memory_pool_size: 16777216
      memory_pool_device: cuda
      codec_chunk_frames: 20
      codec_left_context_frames: 10

stages:
  - stage_id: 0
    devices: "0"
    output_connectors:
      to_stage_1: fabric
    default_sampling_params: {seed: 7}
  - stage_id: 1
    devices: "1"
    input_connectors:
      from_stage_0: fabric
    output_connectors:
      to_stage_2: fabric
  - stage_id: 2
    devices: "2"
    input_connectors:
      from_stage_1: fabric
"""

Load = Callable[[str], DeployFile]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def write_and_load(text: str) -> DeployFile:
        path = tmp_path / "deploy.yaml"
        path.write_text(text, encoding="utf-8")
        return load_deploy(path)

    return write_and_load


@deterministic
def test_off_means_off_without_quotes_too(load: Load) -> None:
    for word in ("off", "Off", "'off'"):
        config = load(CHAIN.replace("host: auto", f"same_host_link: {word}")).config_for_stage(0)
        assert config.same_host_link == "off"
    with pytest.raises(ConfigError, match="fallback: False is not allowed"):
        load(CHAIN.replace("host: auto", "fallback: off"))


def line_of(text: str, piece: str, nth: int = 1) -> int:
    return [number for number, line in enumerate(text.splitlines(), 1) if piece in line][nth - 1]


def refused(load: Load, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.source is not None
    assert str(caught.value).startswith(caught.value.source)
    assert caught.value.source.endswith("deploy.yaml")
    return caught.value


def two_stages(definition: str = "", *, output: str = "node", source: str = "node", rest: str = "") -> str:
    return f"""\
connectors:
  node:
    name: TrioMoriConnector
    extra: {{{definition}}}
{rest}
stages:
  - stage_id: 0
    output_connectors: {{to_stage_1: {output}}}
  - stage_id: 1
    input_connectors: {{from_stage_0: {source}}}
"""


# --- what a stage gets ---


@deterministic
def test_each_stage_of_a_chain_gets_one_connector_with_the_role_of_its_edges(load: Load) -> None:
    deploy = load(CHAIN)
    assert deploy.async_chunk
    assert deploy.stages == (0, 1, 2)
    assert deploy.edges == (Edge(0, 1, "fabric"), Edge(1, 2, "fabric"))
    first, middle, last = (deploy.config_for_stage(stage) for stage in deploy.stages)
    assert [config.role for config in (first, middle, last)] == ["sender", "both", "receiver"]
    assert [config.stage_id for config in (first, middle, last)] == [0, 1, 2]
    assert [(config.from_stage, config.to_stage) for config in (first, middle, last)] == [(0, 1), (0, 2), (1, 2)]
    for config in (first, middle, last):
        assert (config.backend_type, config.memory_pool_device) == ("xgmi", "cuda")
        assert config.memory_pool_size == 16777216
        assert (config.codec_chunk_frames, config.codec_left_context_frames) == (20, 10)
        assert config.extra["codec_chunk_frames"] == 20


@deterministic
def test_a_stage_dials_the_port_on_which_the_stage_before_it_listens(load: Load) -> None:
    deploy = load(CHAIN)
    first, middle, last = (deploy.config_for_stage(stage) for stage in deploy.stages)
    assert (first.zmq_port, middle.zmq_port) == (41000, 41001)
    assert (middle.sender_host, middle.sender_zmq_port) == ("auto", first.zmq_port)
    assert (last.sender_host, last.sender_zmq_port) == ("auto", middle.zmq_port)
    assert first.sender_endpoint is None
    assert last.sender_endpoint is not None
    assert last.sender_endpoint.address == "tcp://127.0.0.1:41001"


@deterministic
def test_replica_and_rank_enter_into_both_ports(load: Load) -> None:
    deploy = load(CHAIN)
    ports = set()
    for replica in range(2):
        for rank in range(2):
            first, middle, last = (deploy.config_for_stage(n, rank=rank, replica=replica) for n in deploy.stages)
            assert (middle.rank, middle.replica) == (rank, replica)
            assert (middle.sender_zmq_port, last.sender_zmq_port) == (first.zmq_port, middle.zmq_port)
            ports |= {first.zmq_port, middle.zmq_port}
    assert len(ports) == 8


@deterministic
def test_overrides_replace_what_the_file_and_its_edges_say(load: Load) -> None:
    config = load(CHAIN).config_for_stage(1, zmq_port=0, sender_zmq_port=7, sender_host="10.0.0.3", peer_timeout=60)
    assert (config.zmq_port, config.sender_zmq_port, config.sender_host) == (0, 7, "10.0.0.3")
    assert config.peer_timeout == 60
    cpu = load(CHAIN).config_for_stage(1, backend_type="shm", memory_pool_device="cpu")
    assert cpu.backend_type == "shm"


@deterministic
def test_a_bad_override_is_refused_with_its_stage(load: Load) -> None:
    deploy = load(CHAIN)
    for key, value in {"zmq_port": 70000, "rank": "0", "replica": -1, "role": "sendr", "from_stage": True}.items():
        with pytest.raises(ConfigError) as caught:
            deploy.config_for_stage(1, **{key: value})
        assert caught.value.key == key
        assert caught.value.source == deploy.path
        assert "stage 1" in str(caught.value)


@deterministic
def test_without_fixed_ports_a_receiver_waits_to_be_told(load: Load) -> None:
    deploy = load(two_stages("zmq_port: 0"))
    assert deploy.config_for_stage(0).zmq_port == 0
    assert deploy.config_for_stage(1).sender_zmq_port is None
    assert deploy.config_for_stage(1).sender_endpoint is None
    assert deploy.config_for_stage(1, sender_zmq_port=7).sender_endpoint is not None


@deterministic
def test_an_address_in_the_file_is_dialled_unless_the_sender_has_another(load: Load) -> None:
    assert load(two_stages("host: 10.0.0.3")).config_for_stage(1).sender_host == "10.0.0.3"
    there = load(two_stages("sender_host: 10.0.0.4, sender_zmq_port: 9")).config_for_stage(1).sender_endpoint
    assert there is not None
    assert there.address == "tcp://10.0.0.4:9"


@pytest.mark.parametrize("extra", ["", "    extra:\n", "    extra: {}\n"])
@pytest.mark.parametrize(("name", "engine"), [("TrioMoriConnector", "shm"), ("MoriTransferEngineConnector", "rdma")])
def test_a_connector_without_keys_means_the_defaults_of_its_name(
    load: Load, name: str, engine: str, extra: str
) -> None:
    text = two_stages().replace("TrioMoriConnector", name).replace("    extra: {}\n", extra)
    config = load(text).config_for_stage(0)
    stage = {"stage_id", "from_stage", "to_stage"}
    expected = attrs.asdict(ConnectorConfig(backend_type=engine), recurse=False)
    given = attrs.asdict(config, recurse=False)
    assert {key: given[key] for key in KEYS if key not in stage} == {
        key: expected[key] for key in KEYS if key not in stage
    }


@deterministic
def test_one_end_of_an_edge_is_enough(load: Load) -> None:
    text = two_stages().replace("    input_connectors: {from_stage_0: node}\n", "")
    assert load(text).config_for_stage(1).role == "receiver"


@deterministic
def test_a_stage_may_hold_the_definition_itself(load: Load) -> None:
    inline = "{name: TrioMoriConnector, extra: {zmq_port: 42000}}"
    deploy = load(two_stages(output=inline, source=inline))
    assert deploy.edges == (Edge(0, 1, "stage 0.output_connectors.to_stage_1"),)
    assert deploy.config_for_stage(0).zmq_port == 42000
    assert deploy.config_for_stage(1).sender_zmq_port == 42000
    assert load(two_stages(output=inline, source="{name: TrioMoriConnector, extra: {zmq_port: 42000}}"))


@deterministic
def test_yaml_anchors_and_merges_work(load: Load) -> None:
    deploy = load(
        two_stages(
            rest="""\
  base: &base
    name: TrioMoriConnector
    extra: &keys {zmq_port: 43000, peer_timeout: 40}
  other:
    <<: *base
    extra:
      <<: *keys
      zmq_port: 44000
""",
            output="other",
            source="other",
        )
    )
    config = deploy.config_for_stage(0)
    assert (config.zmq_port, config.peer_timeout) == (44000, 40)


@deterministic
def test_async_chunk_is_what_the_file_says(load: Load) -> None:
    assert load(two_stages()).async_chunk
    assert not load("async_chunk: false\n" + two_stages()).async_chunk
    error = refused(load, "async_chunk: 1\n" + two_stages())
    assert "line 1: async_chunk: 1 is not allowed; give true or false" in str(error)


@deterministic
def test_a_file_may_have_no_connectors_at_all(load: Load) -> None:
    deploy = load("stages:\n- stage_id: 0\n")
    assert deploy.edges == ()
    with pytest.raises(ConfigError, match="stage 0 has no edge; the edges are none"):
        deploy.config_for_stage(0)


@deterministic
def test_a_stage_that_is_not_there_is_refused_with_those_that_are(load: Load) -> None:
    for stage in (7, -1, "0"):
        with pytest.raises(ConfigError, match=r"there is no stage .*; there are 0, 1, 2"):
            load(CHAIN).config_for_stage(stage)  # type: ignore[arg-type]


# --- several edges at one stage ---

FAN = """\
connectors:
  node: {name: TrioMoriConnector, extra: {zmq_port: 41000}}
  wire: {name: TrioMoriConnector, extra: {zmq_port: 42000}}
  pipe: {name: SharedMemoryConnector}
stages:
  - stage_id: 0
    output_connectors: {to_stage_2: node, to_stage_3: node}
  - stage_id: 1
    output_connectors: {to_stage_2: node}
  - stage_id: 2
    input_connectors: {from_stage_0: node, from_stage_1: node}
    output_connectors: {to_stage_3: node, to_stage_4: wire}
  - stage_id: 3
  - stage_id: 4
    output_connectors: {to_stage_5: pipe}
  - stage_id: 5
"""


@deterministic
def test_one_connector_serves_several_outputs(load: Load) -> None:
    config = load(FAN).config_for_stage(0)
    assert (config.role, config.zmq_port, config.to_stage) == ("sender", 41000, None)


@deterministic
def test_each_of_several_inputs_needs_a_connector(load: Load) -> None:
    deploy = load(FAN)
    with pytest.raises(ConfigError, match="give from_stage=0 or from_stage=1"):
        deploy.config_for_stage(2, to_stage=3)
    one = deploy.config_for_stage(2, from_stage=0, to_stage=3)
    two = deploy.config_for_stage(2, from_stage=1, role="receiver")
    assert (one.role, one.sender_zmq_port, one.zmq_port) == ("both", 41000, 41002)
    assert (two.role, two.sender_zmq_port, two.to_stage) == ("receiver", 41001, 2)


@deterministic
def test_outputs_through_different_connectors_need_one_each(load: Load) -> None:
    deploy = load(FAN)
    with pytest.raises(ConfigError, match=r"give to_stage=3 \(node\) or to_stage=4 \(wire\)"):
        deploy.config_for_stage(2, role="sender")
    assert deploy.config_for_stage(2, role="sender", to_stage=4).zmq_port == 42002


@deterministic
def test_an_edge_that_is_not_there_is_refused_with_those_that_are(load: Load) -> None:
    with pytest.raises(
        ConfigError, match="stage 3 has no edge with from_stage=1; the edges are 0->2, 0->3, 1->2, 2->3"
    ):
        load(FAN).config_for_stage(3, from_stage=1)


@deterministic
def test_a_connector_of_somebody_else_is_refused_when_it_is_asked_for(load: Load) -> None:
    deploy = load(FAN)
    assert deploy.config_for_stage(4, role="receiver").sender_zmq_port == 42002
    for stage, key in ((5, "name"), (4, "name")):
        with pytest.raises(ConfigError) as caught:
            deploy.config_for_stage(stage)
        assert caught.value.key == key
        assert (
            "line 4: connectors.pipe: name: 'SharedMemoryConnector' is not a connector of trio_mori; "
            "give MoriTransferEngineConnector or TrioMoriConnector"
        ) in str(caught.value)


# --- a middle stage between two definitions ---


def middle(one: str, two: str) -> str:
    return f"""\
connectors:
  one: {{name: TrioMoriConnector, extra: {{{one}}}}}
  two: {{name: TrioMoriConnector, extra: {{{two}}}}}
stages:
  - stage_id: 0
    output_connectors: {{to_stage_1: one}}
  - stage_id: 1
    input_connectors: {{from_stage_0: one}}
    output_connectors: {{to_stage_2: two}}
  - stage_id: 2
    input_connectors: {{from_stage_1: two}}
"""


@deterministic
def test_a_middle_stage_listens_as_its_output_says_and_dials_as_its_input_says(load: Load) -> None:
    deploy = load(middle("host: 10.0.0.1, zmq_port: 41000, codec_chunk_frames: 5", "host: 10.0.0.2, zmq_port: 42000"))
    config = deploy.config_for_stage(1)
    assert (config.host, config.zmq_port) == ("10.0.0.2", 42001)
    assert (config.sender_host, config.sender_zmq_port) == ("10.0.0.1", 41000)
    assert config.codec_chunk_frames == 25
    assert deploy.config_for_stage(2).sender_zmq_port == 42001


@deterministic
def test_a_middle_stage_has_one_pool(load: Load) -> None:
    deploy = load(middle("memory_pool_size: 8192", "zmq_port: 42000"))
    assert deploy.config_for_stage(0).memory_pool_size == 8192
    with pytest.raises(ConfigError) as caught:
        deploy.config_for_stage(1)
    assert caught.value.key == "memory_pool_size"
    assert "connectors.two: memory_pool_size: 1073741824 is not allowed with 8192 in connectors.one, line 2" in str(
        caught.value
    )
    assert deploy.config_for_stage(1, role="receiver").memory_pool_size == 8192


@deterministic
def test_a_middle_stage_has_one_engine(load: Load) -> None:
    deploy = load(middle("backend_type: rdma", "backend_type: shm, zmq_port: 42000"))
    with pytest.raises(ConfigError, match=r"line 3: connectors.two: backend_type: 'shm' is not allowed with 'rdma'"):
        deploy.config_for_stage(1)


@deterministic
def test_a_role_in_the_file_is_refused_where_the_edges_say_another(load: Load) -> None:
    deploy = load(two_stages("role: sender"))
    assert deploy.config_for_stage(0).role == "sender"
    with pytest.raises(
        ConfigError, match=r"line 4: connectors.node: role: 'sender' .* the edges make stage 1 a receiver"
    ):
        deploy.config_for_stage(1)
    assert deploy.config_for_stage(1, role="receiver").role == "receiver"


# --- what a file may not say ---


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ("zmq_port: 70000", "zmq_port", "70000 is not allowed; give an integer from 0 to 65535"),
        ('zmq_port: "50051"', "zmq_port", "'50051' is not allowed; give an integer from 0 to 65535"),
        ("zmq_port: null", "zmq_port", "None is not allowed"),
        ("zmq_port: 65535", "zmq_port", "above 65535"),
        ("role: auto", "role", "one of sender, receiver, both"),
        ("backend_type: tcp", "backend_type", "one of shm, rdma"),
        ("backend_type: xgmi", "memory_pool_device", "'cpu' is not allowed with backend_type xgmi"),
        ("buffer_ttl_seconds: .inf", "buffer_ttl_seconds", "inf is not allowed"),
        ("buffer_ttl_seconds: 0", "buffer_ttl_seconds", "0 is not allowed"),
        ("memory_pool_size: 1 GiB", "memory_pool_size", "'1 GiB' is not allowed"),
        ("1: 2", "1", "keys are strings"),
    ],
)
def test_a_bad_value_is_named_with_its_file_line_and_path(load: Load, keys: str, key: str, words: str) -> None:
    text = two_stages().replace("    extra: {}\n", f"    extra:\n      peer_timeout: 30\n      {keys}\n")
    if words == "above 65535":  # stage 0 still fits
        text = text.replace("stage_id: 0", "stage_id: 2").replace("from_stage_0", "from_stage_2")
    error = refused(load, text)
    assert error.key == key
    line = line_of(text, keys) if key != "memory_pool_device" else line_of(text, "  node:")
    assert f"deploy.yaml, line {line}: connectors.node" in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("stages: [", 1, "not YAML"),
        ("a: 1\n\tb: 2\n", 2, "not YAML"),
        ("stages: []\nstages: []\n", 2, "the key 'stages' is there twice, first on line 1"),
        ("? [1]\n: 2\n", 1, "a key is a list or a mapping"),
        ("a: !!python/object:os.system x\n", 1, "not YAML"),
        ("- stage_id: 0\n", 1, "a value of type list at top level is not allowed; give a mapping with stages in it"),
        ("", 1, "None at top level is not allowed"),
        ("just words", 1, "'just words' at top level is not allowed"),
        ("a: 1\n", 1, "stages: it is missing; give a list of stages"),
        ("stage_args: []\n", 1, "the older layout, are not read"),
        ("a: 1\nstages: {}\n", 2, "stages: a value of type Section is not allowed; give a list of stages"),
        ("stages:\n- 1\n", 1, "1 is not allowed in it; each stage is a mapping"),
        ("stages:\n- devices: 0\n", 2, "stage_id: it is missing; give an integer from 0"),
        ("stages:\n- stage_id: true\n", 2, "stage_id: True is not allowed"),
        ("stages:\n- stage_id: -1\n", 2, "stage_id: -1 is not allowed"),
        ("stages:\n- stage_id: '0'\n", 2, "stage_id: '0' is not allowed"),
        ("stages:\n- stage_id: 0\n- stage_id: 0\n", 3, "stage_id: 0 is not allowed twice; it is on line 2 already"),
        ("connectors: []\nstages: []\n", 1, "connectors: a value of type list is not allowed; give a mapping"),
        ("connectors:\n  node: x\nstages: []\n", 2, "connectors.node: 'x' is not allowed; give a mapping with name"),
        ("connectors:\n  7: {name: x}\nstages: []\n", 2, "7 is no name"),
        ("connectors:\n  node: {extra: {}}\nstages: []\n", 2, "connectors.node: name: it is missing; give Mori"),
        ("connectors:\n  node: {name: x, extra: []}\nstages: []\n", 2, "connectors.node.extra: a value of type list"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(load: Load, text: str, line: int, words: str) -> None:
    message = str(refused(load, text))
    assert f"deploy.yaml, line {line}: " in message
    assert words in message


@pytest.mark.parametrize("text", ['a: !!int ""', "a: 2001-99-99", "a: !!timestamp x", "a: !!bool x", "\x00"])
def test_what_the_yaml_parser_chokes_on_is_not_yaml(load: Load, text: str) -> None:
    assert "not YAML" in str(refused(load, text))


@pytest.mark.parametrize("text", ["\n" + "[" * 5000, "\n" + "{a: " * 5000, "\n" + "- " * 5000])
def test_a_file_that_is_nested_too_deep_is_refused_with_line_and_limit(load: Load, text: str) -> None:
    assert "deploy.yaml, line 2: not YAML: it is nested more than 64 levels deep" in str(refused(load, text))


@deterministic
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.yaml: cannot be read: .*No such file") as caught:
        load_deploy(tmp_path / "deploy.yaml")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    (tmp_path / "deploy.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_deploy(tmp_path / "deploy.yaml")


@pytest.mark.parametrize("key", ["from_stage_x", "from_stage_", "to_stage_0", "from_stage_-1", "stage_0", "7"])
def test_a_key_that_names_no_stage_is_refused(load: Load, key: str) -> None:
    text = two_stages().replace("from_stage_0", key)
    error = refused(load, text)
    assert f"line {line_of(text, 'input_connectors')}: stage 1.input_connectors: " in str(error)
    assert "give from_stage_N, N being a stage_id" in str(error)


@pytest.mark.parametrize("value", ["7", "[]", "null", "true"])
def test_an_edge_goes_through_a_name_or_a_definition(load: Load, value: str) -> None:
    error = refused(load, two_stages(source=value))
    assert "stage 1.input_connectors.from_stage_0: " in str(error)
    assert "give the name of a connector, or a mapping with name and extra" in str(error)


@deterministic
def test_an_undefined_connector_is_refused_with_those_that_are_defined(load: Load) -> None:
    text = two_stages(source="nodes")
    assert (
        f"line {line_of(text, 'input_connectors')}: stage 1.input_connectors.from_stage_0: 'nodes' is not defined; "
        "connectors has node; did you mean 'node'?"
    ) in str(refused(load, text))


@pytest.mark.parametrize("other", ["wire", "{name: TrioMoriConnector}"])
def test_both_ends_of_an_edge_name_the_same_connector(load: Load, other: str) -> None:
    text = two_stages(source=other, rest="  wire: {name: TrioMoriConnector}\n")
    message = str(refused(load, text))
    assert f"line {line_of(text, 'input_connectors')}: edge 0->1: " in message
    assert f"but node on line {line_of(text, 'output_connectors')}; both ends name the same connector" in message


@deterministic
def test_definitions_in_place_at_both_ends_have_to_be_equal(load: Load) -> None:
    text = two_stages(
        output="{name: TrioMoriConnector, extra: {zmq_port: 1}}",
        source="{name: TrioMoriConnector, extra: {zmq_port: 2}}",
    )
    assert "both ends name the same connector" in str(refused(load, text))


@deterministic
def test_an_edge_leads_to_a_stage_that_exists(load: Load) -> None:
    text = two_stages().replace("to_stage_1", "to_stage_9")
    assert f"line {line_of(text, 'output_connectors')}: edge 0->9: there is no stage 9; there are 0, 1" in str(
        refused(load, text)
    )
    assert "a stage has no edge to itself" in str(refused(load, two_stages().replace("to_stage_1", "to_stage_0")))


@deterministic
def test_a_stage_in_the_middle_expects_the_key_of_the_stage_before_it(load: Load) -> None:
    own = "curve_secret_key: /keys/stage.secret"
    deploy = load(
        middle(
            f"zmq_port: 41000, {own}, curve_sender_key: /keys/thinker.public",
            f"zmq_port: 41100, {own}, curve_sender_key: /keys/talker.public",
        )
    )
    assert deploy.config_for_stage(1).curve_sender_key == "/keys/thinker.public"
    assert deploy.config_for_stage(2).curve_sender_key == "/keys/talker.public"
    assert {deploy.config_for_stage(stage).curve_secret_key for stage in range(3)} == {"/keys/stage.secret"}


def test_two_stages_of_one_machine_do_not_listen_on_one_port(load: Load) -> None:
    error = refused(load, middle("zmq_port: 41001", "zmq_port: 41000"))
    assert (error.key, error.value) == ("zmq_port", 41000)
    assert (
        "line 3: connectors.two: zmq_port: 41000 is not allowed; stage 1 would listen on port 41001, "
        "as stage 0 does by connectors.one, line 2"
    ) in str(error)
    assert refused(load, middle("zmq_port: 41001, host: 10.0.0.1", "zmq_port: 41000, host: auto"))
    assert load(middle("zmq_port: 41001, host: 10.0.0.1", "zmq_port: 41000, host: 10.0.0.2"))
    assert load(middle("zmq_port: 0", "zmq_port: 0"))


# --- whatever a file contains ---

WORDS = st.sampled_from(
    [
        "connectors",
        "stages",
        "stage_id",
        "input_connectors",
        "output_connectors",
        "from_stage_0",
        "to_stage_1",
        "node",
        "name",
        "extra",
        "TrioMoriConnector",
        "zmq_port",
        "role",
        "async_chunk",
    ]
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.floats() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def as_yaml(tree: object) -> str:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{as_yaml(key)}: {as_yaml(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(as_yaml, tree)) + "]"
    if isinstance(tree, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(str(tree), str(tree))
    return {None: "null", True: "true", False: "false"}.get(tree) or str(tree)  # type: ignore[call-overload]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "connectors": st.fixed_dictionaries({"node": st.fixed_dictionaries({"name": WORDS, "extra": TREES})})
            | TREES,
            "stages": st.lists(
                st.fixed_dictionaries(
                    {"stage_id": st.integers(0, 2)}, optional={"input_connectors": TREES, "output_connectors": TREES}
                ),
                max_size=3,
            )
            | TREES,
        },
    )
    | TREES
)
def test_a_file_is_a_deployment_or_a_config_error(load: Load, tree: object) -> None:
    try:
        deploy = load(as_yaml(tree))
    except ConfigError:
        return
    for stage in deploy.stages:
        with contextlib.suppress(ConfigError):
            assert deploy.config_for_stage(stage).stage_id == stage


# --- misspelt keys ---


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was warned of so far, without the directory of the file."""
    monkeypatch.setattr(_config, "_warned", set())
    return lambda: [record.getMessage().rpartition("/")[2] for record in caplog.records]


@deterministic
def test_a_misspelt_key_of_a_connector_is_warned_of_once_with_file_and_line(
    load: Load, warnings: Callable[[], list[str]]
) -> None:
    text = CHAIN.replace("memory_pool_size", "memory_pol_size")
    deploy = load(text)
    deploy.config_for_stage(0)
    deploy.config_for_stage(1)
    assert warnings() == [
        f"deploy.yaml, line {line_of(text, 'memory_pol_size')}: connectors.fabric: 'memory_pol_size' is no key of a "
        "connector; it stays in extra: did you mean 'memory_pool_size' or 'memory_pool_device'?"
    ]


@deterministic
@pytest.mark.parametrize(
    ("text", "piece", "words"),
    [
        (
            CHAIN.replace("async_chunk", "async_chunks"),
            "async_chunks",
            "'async_chunks' is not read; did you mean",
        ),
        (
            CHAIN.replace("    input_connectors:", "    input_connector:", 1),
            "input_connector:",
            "stage 1: 'input_connector' is not read; did you mean 'input_connectors'?",
        ),
        (
            CHAIN.replace("    extra:", "    extras:"),
            "extras:",
            "connectors.fabric: 'extras' is not read; did you mean 'extra'?",
        ),
    ],
)
def test_a_key_that_looks_like_one_that_is_read_is_warned_of_with_its_line(
    load: Load, warnings: Callable[[], list[str]], text: str, piece: str, words: str
) -> None:
    with contextlib.suppress(ConfigError):  # without `extra` the engine may not fit
        load(text)
    [warning] = warnings()
    assert warning.startswith(f"deploy.yaml, line {line_of(text, piece)}: {words}")


@deterministic
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("connectors:", "conectors:", "connectors has none; did you mean 'connectors' by 'conectors' on line 4?"),
        (
            "stages:",
            "stage:",
            "give a list of stages; did you mean 'stages' by 'stage' on line 16?",
        ),
        ("stage_id: 1", "stageid: 1", "did you mean 'stage_id' by 'stageid' on line"),
        ("name: Mori", "nam: Mori", "did you mean 'name' by 'nam' on line 6?"),
    ],
)
def test_a_key_that_is_missing_and_may_be_there_misspelt_is_suggested(
    load: Load, old: str, new: str, words: str
) -> None:
    assert words in str(refused(load, CHAIN.replace(old, new, 1)))


@deterministic
def test_keys_of_others_are_not_taken_for_misspelt_ones(load: Load, warnings: Callable[[], list[str]]) -> None:
    others = "stage_args: []\nconnector_type: x\n"
    load(others + CHAIN.replace("    devices:", "    stage_type: llm\n    engine_input_source: [0]\n    devices:"))
    assert warnings() == []
