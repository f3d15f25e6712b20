from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_mori._errors import KeyRefused
from trio_mori._protocol.keys import chunk_key, chunk_owner, edge_name, edge_of, full_key, names_of

deterministic = pytest.mark.deterministic


@deterministic
def test_keys_are_spelled_as_vllm_omni_spells_them() -> None:
    assert chunk_key("req-1", "0", 7) == "req-1_0_7"
    assert full_key("req-1_0_7", "0", "1") == "req-1_0_7@0_1"


@deterministic
@pytest.mark.parametrize(
    ("key", "edge"), [("k@0_1", "0_1"), ("a@b@0_1", "0_1"), ("k", ""), ("k@", ""), ("k@0", "0"), ("@0_1", "0_1")]
)
def test_the_edge_is_what_stands_behind_the_last_at(key: str, edge: str) -> None:
    assert edge_of(key) == edge


@deterministic
@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("req_0_7@0_1", "req"),
        ("req_0_7@0_thinker", "req"),
        ("req_thinker_0@thinker_talker", "req"),
        ("req-1_extra_0_0@0_1", "req-1_extra"),
        ("a_1_2_0_0@0_1", "a_1_2"),
        ("a@b_0_0@0_1", "a@b"),
        ("two\nlines_0_0@0_1", "two\nlines"),
        ("__0_0@0_1", "_"),
        ("req_1_7@0_1", None),  # a chunk of another stage's
        ("req_0_x@0_1", None),
        ("req_0_-1@0_1", None),
        ("req_0@0_1", None),
        ("_0_0@0_1", None),  # of no request
        ("req_0_7", None),
        ("req_0_7@0", None),
        ("req_0_7@01", None),
        ("", None),
    ],
)
def test_a_chunk_belongs_to_the_request_in_its_key_and_to_no_other(key: str, owner: str | None) -> None:
    assert chunk_owner(key) == owner


@deterministic
@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("req_0_7@0_1", ("req_0_7", "req")),
        ("req_1_7@0_1", ("req_1_7",)),
        ("whole@0_1", ("whole",)),
        ("a@b@0_1", ("a@b",)),
    ],
)
def test_a_payload_is_cleaned_up_by_its_own_key_or_by_its_request(key: str, names: tuple[str, ...]) -> None:
    assert names_of(key) == names


stages = st.text(st.characters(exclude_characters="_@", exclude_categories=["Cs"]), min_size=1, max_size=5)


@given(request=st.text(min_size=1, max_size=20), source=stages, target=stages, number=st.integers(0, 1 << 40))
def test_any_request_is_found_by_any_of_its_chunks(request: str, source: str, target: str, number: int) -> None:
    key = full_key(chunk_key(request, source, number), source, target)
    assert chunk_owner(key) == request
    assert edge_of(key) == f"{source}_{target}"
    assert names_of(key) == (chunk_key(request, source, number), request)


@deterministic
@pytest.mark.parametrize(("source", "target"), [("a_b", "c"), ("a", "b_c"), ("_", "1"), ("0", "1@2"), ("x@0", "1")])
def test_stages_whose_edge_another_edge_could_be_are_refused(source: str, target: str) -> None:
    rule = r"from stage '.*' to '.*': the name of a stage has no '_' and no '@'.* write '-', or number the stages"
    with pytest.raises(KeyRefused, match=rf"key 'k' {rule}"):
        full_key("k", source, target)
    with pytest.raises(KeyRefused, match=f"the edge {rule}"):
        edge_name(source, target)
    assert full_key("k_@_@0_1", "0", "1") == "k_@_@0_1@0_1", "in keys they may stand"
    assert edge_name("thinker", "talker-2") == "thinker_talker-2"


@given(
    key=st.text(max_size=8), one=st.lists(st.text("ab_@", max_size=4), min_size=2, max_size=2), other=st.text("ab_@")
)
def test_no_two_edges_are_spelled_alike(key: str, one: list[str], other: str) -> None:
    seen: dict[str, tuple[str, str, str]] = {}
    for source, target in (
        (one[0], one[1]),
        (one[0] + "_" + other, one[1]),
        (one[0], other + "_" + one[1]),
        (other, one[1]),
    ):
        with contextlib.suppress(KeyRefused):
            edge = (key, source, target)
            assert seen.setdefault(full_key(*edge), edge) == edge
