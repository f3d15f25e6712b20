"""Keys in files: made by ``trio-mori keygen``, read when a connector opens, refused where others could read or write.

A line is ``secret-key KEY`` or ``public-key KEY NAME``; others are empty or begin with ``#``. Files of public keys put
together are a list of those allowed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import attrs

from ._config import ConnectorConfig
from ._errors import ConfigError
from ._keys import Keys
from ._zmq_socket import is_key, new_key_pair, public_key_of

# Some thousand keys.
_LONGEST = 1 << 18

_LINE = re.compile(rb"(secret|public)-key[ \t]+(\S{40})(?:[ \t]+(\S{1,64}))?[ \t]*")
_NAME = re.compile(r"[\x21-\x7e]{1,64}")

_SECRET_TEXT = "# The secret key of a trio_mori connector. Whoever reads it can connect in its place.\nsecret-key {}\n"


def load_keys(config: ConnectorConfig) -> Keys | None:
    """Read the keys that a configuration names; None if it names none. Blocks as long as the file system does.

    Raises:
        ConfigError: a file cannot be read, is no key file, or is open to others; names it and the remedy.
    """
    if not config.curve_secret_key:
        return None
    secret = _File("curve_secret_key", config.curve_secret_key).secret()
    public = public_key_of(secret)
    sender = public
    if config.curve_sender_key:
        file = _File("curve_sender_key", config.curve_sender_key)
        found = list(file.public())
        if len(found) != 1:
            raise file.refused(f"holds {len(found)} keys; name the file with the one public key of the sender")
        sender = found[0]
    allowed = {public: "own"}
    if config.curve_allowed_keys:
        allowed |= _File("curve_allowed_keys", config.curve_allowed_keys).public()
    return Keys(public=public, secret=secret, sender=sender, allowed=allowed)


def write_pair(path: str, name: str) -> tuple[Path, Path]:
    """Make a new pair: ``PATH.secret``, for its owner alone, and ``PATH.public``. Returns both paths.

    Raises:
        ConfigError: one of them exists or cannot be written, or the name has spaces.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name: {name!r} is not allowed; give --name with up to 64 ASCII characters and without spaces",
            key="name",
            value=name,
        )
    secret_path, public_path = Path(f"{path}.secret"), Path(f"{path}.public")
    for target in (secret_path, public_path):
        if os.path.lexists(target):  # before half of a pair is written
            raise ConfigError(f"{target} exists; remove it, or give another path", key="path", value=path)
    public, secret = new_key_pair()
    for target, mode, text in (
        (secret_path, 0o600, _SECRET_TEXT.format(secret.decode())),
        (public_path, 0o644, f"public-key {public.decode()} {name}\n"),
    ):
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            if target is public_path:
                secret_path.unlink()  # half of a pair would be in the way of the next
            remedy = "give a path in a directory that is there and that you may write to"
            raise ConfigError(f"cannot write {target}: {error.strerror}; {remedy}", key="path", value=path) from error
        with os.fdopen(fd, "w") as file:
            file.write(text)
    return secret_path, public_path


@attrs.frozen
class _File:
    """A key file, and the key of the configuration that names it."""

    key: str
    path: str

    def secret(self) -> bytes:
        """The one secret key in it."""
        found = self._lines(secret=True)
        keys = [key for kind, key, _name in found if kind == b"secret"]
        if len(keys) != 1:
            if keys:
                remedy = "leave the one that is this side's own"
            else:
                remedy = "it is a file of public keys: name the .secret one" if found else "make one: trio-mori keygen"
            raise self.refused(f"holds {len(keys)} secret keys; {remedy}")
        return keys[0]

    def public(self) -> dict[bytes, str]:
        """The public keys in it, with their names."""
        found = self._lines(secret=False)
        if any(kind == b"secret" for kind, _key, _name in found):
            raise self.refused("holds a secret key; name the .public file, and keep the secret one to its owner")
        if not found:
            raise self.refused("holds no key; put .public files together in it, as trio-mori keygen writes them")
        return {key: name.decode("ascii", "replace") or "unnamed" for _kind, key, name in found}

    def _lines(self, *, secret: bool) -> list[tuple[bytes, bytes, bytes]]:
        found = []
        for number, line in enumerate(self._read(secret=secret).splitlines(), 1):
            if line.strip() and not line.startswith(b"#"):
                match = _LINE.fullmatch(line.rstrip())
                if match is None or not is_key(match[2]):
                    raise self.refused(
                        f"line {number} is none of a key file; write secret-key or public-key, the 40 characters of "
                        "the key, and for a public one a name; or make the file with trio-mori keygen"
                    )
                found.append((match[1], match[2], match[3] or b""))
        return found

    def _read(self, *, secret: bool) -> bytes:
        try:
            # Without waiting, should it be a pipe. What is checked is what was opened, whatever the path is by then.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self.refused(f"cannot be read ({error.strerror}); make it with trio-mori keygen") from error
        try:
            self._check_access(os.fstat(fd), secret=secret)  # before Python opens it as a file: a directory is none
            with os.fdopen(fd, "rb", closefd=False) as file:
                content = file.read(_LONGEST + 1)
        finally:
            os.close(fd)
        if len(content) > _LONGEST:
            raise self.refused(f"has more than {_LONGEST} bytes; it is no key file")
        return content

    def _check_access(self, status: os.stat_result, *, secret: bool) -> None:
        own = os.geteuid()
        seen = f"has mode {stat.S_IMODE(status.st_mode):o} and belongs to uid {status.st_uid}"
        if not stat.S_ISREG(status.st_mode):
            raise self.refused("is no regular file; name a file that trio-mori keygen wrote")
        if secret and (status.st_uid != own or status.st_mode & 0o077):
            raise self.refused(f"{seen}; a secret key is for uid {own} alone: chown {own} and chmod 600 it")
        if not secret and (status.st_uid not in (own, 0) or status.st_mode & 0o022):
            raise self.refused(
                f"{seen}; whoever writes it decides who may connect: chown {own} and chmod go-w it, so that only "
                f"uid {own} or root can"
            )

    def refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self.key}: the file {self.path} {why}", key=self.key, value=self.path)
