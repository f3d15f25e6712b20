"""Keys in files: made by the command, read where only their owner could have written them, refused by name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from descriptors import open_files

from trio_mori import ConfigError, ConnectorConfig
from trio_mori.__main__ import main
from trio_mori._key_files import load_keys, write_pair
from trio_mori._zmq_socket import public_key_of

pytestmark = pytest.mark.deterministic


def config(secret: Path, **more: Path) -> ConnectorConfig:
    """A configuration with keys."""
    others = {key: str(path) for key, path in more.items()}
    return ConnectorConfig.from_dict({"curve_secret_key": str(secret), **others})


def refusal(secret: Path, **more: Path) -> str:
    """Why these files are refused."""
    with pytest.raises(ConfigError) as caught:
        load_keys(config(secret, **more))
    assert str(caught.value).startswith(caught.value.key)
    return str(caught.value)


def test_the_command_writes_a_pair_that_belongs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.umask(os.umask(0o077) & ~0o777 | 0o022)
    assert main(["keygen", str(tmp_path / "thinker")]) == 0
    secret, public = tmp_path / "thinker.secret", tmp_path / "thinker.public"
    assert (stat.S_IMODE(secret.stat().st_mode), stat.S_IMODE(public.stat().st_mode) & 0o600) == (0o600, 0o600)
    keys = load_keys(config(secret))
    assert keys is not None
    assert keys.public == keys.sender == public_key_of(keys.secret)
    assert public.read_text() == f"public-key {keys.public.decode()} thinker\n"
    assert dict(keys.allowed) == {keys.public: "own"}
    printed = capsys.readouterr().out
    assert str(secret) in printed
    assert keys.secret.decode() not in printed


def test_the_command_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a")
    assert main(["keygen", path]) == 0
    before = (tmp_path / "a.secret").read_bytes()
    assert main(["keygen", path]) == 1
    assert "a.secret" in capsys.readouterr().err
    assert (tmp_path / "a.secret").read_bytes() == before
    (tmp_path / "a.secret").unlink()
    assert main(["keygen", path]) == 1
    assert "a.public exists" in capsys.readouterr().err
    assert not (tmp_path / "a.secret").exists(), "half of a pair is of no use"
    assert main(["keygen", str(tmp_path / "no" / "such")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["two words", "", "x" * 65, "tab\tbed"])
def test_a_name_that_would_break_a_list_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="without spaces"):
        write_pair(str(tmp_path / "a"), name)
    assert list(tmp_path.iterdir()) == []


def test_no_half_of_a_pair_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = os.open

    def full(path: Path, *rest: int) -> int:
        if path.suffix == ".public":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_(path, *rest)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ConfigError, match=r"a\.public: No space left on device; give a path"):
        write_pair(str(tmp_path / "a"), "a")
    assert not list(tmp_path.iterdir())


def test_public_files_put_together_are_a_list(tmp_path: Path) -> None:
    secret, public = write_pair(str(tmp_path / "own"), "own-name")
    _, other = write_pair(str(tmp_path / "other"), "talker")
    listed = tmp_path / "allowed"
    listed.write_text(f"# who may connect\n\n{public.read_text()}{other.read_text()}")
    listed.chmod(0o644)
    keys = load_keys(config(secret, curve_allowed_keys=listed, curve_sender_key=other))
    assert keys is not None
    assert sorted(keys.allowed.values()) == ["own-name", "talker"]
    assert keys.allowed[keys.sender] == "talker"


def test_no_keys_are_no_files() -> None:
    assert load_keys(ConnectorConfig()) is None


@pytest.mark.parametrize("key", ["curve_sender_key", "curve_allowed_keys"])
def test_keys_of_others_without_an_own_one_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*curve_secret_key"):
        ConnectorConfig.from_dict({key: "/etc/a.public"})


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="begin it with a slash"):
        ConnectorConfig(curve_secret_key="a.secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    secret, _ = write_pair(str(tmp_path / "a"), "a")
    secret.chmod(mode)
    text = refusal(secret)
    assert str(secret) in text
    assert f"mode {mode:o}" in text
    assert "chmod 600" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    secret, public = write_pair(str(tmp_path / "a"), "a")
    os.chown(public, 1234, -1)
    assert "belongs to uid 1234; whoever writes it" in refusal(secret, curve_allowed_keys=public)
    os.chown(secret, 1234, -1)
    assert "belongs to uid 1234; a secret key is for uid 0 alone: chown 0" in refusal(secret)


@pytest.mark.parametrize("mode", [0o664, 0o646])
@pytest.mark.parametrize("key", ["curve_sender_key", "curve_allowed_keys"])
def test_public_keys_that_others_can_replace_are_refused(tmp_path: Path, key: str, mode: int) -> None:
    secret, public = write_pair(str(tmp_path / "a"), "a")
    public.chmod(mode)
    assert "chmod go-w" in refusal(secret, **{key: public})


def test_files_that_are_swapped_are_told_apart(tmp_path: Path) -> None:
    secret, public = write_pair(str(tmp_path / "a"), "a")
    public.chmod(0o600)
    assert "name the .secret one" in refusal(public)
    assert "name the .public file" in refusal(secret, curve_allowed_keys=secret)


def test_two_secret_keys_are_told_apart_from_none(tmp_path: Path) -> None:
    secret, _ = write_pair(str(tmp_path / "a"), "a")
    secret.write_bytes(2 * secret.read_bytes())
    assert "holds 2 secret keys; leave the one" in refusal(secret)


def test_a_directory_is_refused_by_name_and_not_kept_open(tmp_path: Path) -> None:
    secret, _ = write_pair(str(tmp_path / "a"), "a")
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    for message in (refusal(folder), refusal(secret, curve_allowed_keys=folder)):
        assert f"the file {folder} is no regular file" in message
    assert not [path for _, path in open_files() if path.startswith(str(tmp_path))]


def test_what_is_no_key_file_is_refused_by_its_line(tmp_path: Path) -> None:
    secret, _ = write_pair(str(tmp_path / "a"), "a")
    other = tmp_path / "other"
    other.write_text("# fine\npublic-key too-short name\n")
    other.chmod(0o600)
    assert "line 2" in refusal(secret, curve_allowed_keys=other)
    other.write_text("\n")
    assert "holds no key" in refusal(secret, curve_allowed_keys=other)
    assert "trio-mori keygen" in refusal(other)
    other.write_bytes(b"#" * 300_000)
    assert "no key file" in refusal(other)


def test_a_sender_has_one_key(tmp_path: Path) -> None:
    secret, public = write_pair(str(tmp_path / "a"), "a")
    _, other = write_pair(str(tmp_path / "b"), "b")
    both = tmp_path / "both"
    both.write_text(public.read_text() + other.read_text())
    both.chmod(0o600)
    assert "holds 2 keys" in refusal(secret, curve_sender_key=both)


def test_a_missing_file_and_a_pipe_are_refused_without_waiting(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "no regular file" in refusal(tmp_path / "pipe")


def test_a_key_of_forty_letters_that_is_none_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "a.secret"
    for letters in ("~" * 40, "#" * 40):  # no letters of keys; letters of keys, but a number that is too large
        secret.write_text(f"secret-key {letters}")
        secret.chmod(0o600)
        assert "line 1" in refusal(secret)
