"""The client protocol of NATS in frames, as far as the proxy needs it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["Frame", "Parser", "Published", "without_urls"]


class Published(NamedTuple):
    """A message as it was published. Of a header that occurs more than once, the last value is kept.

    An answer without a payload of its own (no responders, end of batch) has ``Status`` and ``Description``
    among its headers, as in nats-py.
    """

    subject: str
    headers: dict[str, str]
    payload: bytes


class Frame:
    """One operation of the NATS client protocol, as it came (``raw``) and taken apart."""

    __slots__ = ("_line", "_words", "op", "raw")

    def __init__(self, op: bytes, words: list[bytes], line: int, raw: bytes) -> None:
        self.op = op
        self.raw = raw
        self._words = words
        self._line = line

    @property
    def subject(self) -> bytes:
        """The subject of a publish or message."""
        return self._words[1]

    @property
    def reply(self) -> bytes:
        """The reply subject of a PUB or HPUB, empty where there is none."""
        return self._words[2] if len(self._words) == (4 if self.op == b"PUB" else 5) else b""

    @property
    def _header(self) -> int:
        return int(self._words[-2]) if self.op in {b"HPUB", b"HMSG"} else 0

    def message(self) -> Published:
        """What was published, taken apart."""
        start = self._line + self._header
        headers = _headers(self.raw[self._line : start]) if self._header else {}
        return Published(self.subject.decode(errors="surrogateescape"), headers, self.raw[start:-2])

    def with_reply(self, reply: bytes) -> bytes:
        """The publish as it came, with another reply subject."""
        sizes = self._words[-2:] if self.op == b"HPUB" else self._words[-1:]
        return b" ".join([self.op, self.subject, reply, *sizes]) + b"\r\n" + self.raw[self._line :]


class Parser:
    """Cuts a byte stream into frames. The bytes of all frames together are the stream's."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned: int = 0
        self._head: tuple[bytes, list[bytes], int, int] | None = None

    def feed(self, data: bytes | bytearray) -> list[Frame]:
        """Take in bytes, and return the frames that are whole by now."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while True:
            if self._head is None:
                end = buffer.find(b"\n", max(start, self._scanned)) + 1
                if not end:
                    self._scanned = len(buffer)
                    break
                self._head = _head(bytes(buffer[start:end]))
            op, words, line, total = self._head
            if len(buffer) - start < total:
                break
            frames.append(Frame(op, words, line, bytes(buffer[start : start + total])))
            start += total
            self._head = None
            self._scanned = start
        del buffer[:start]
        self._scanned = max(0, self._scanned - start)
        return frames


def _head(line: bytes) -> tuple[bytes, list[bytes], int, int]:
    """Operation, words, length of the line, length of the frame."""
    words = line.split()
    op = words[0].upper() if words else b""
    size = 0
    allowed = {b"PUB": (3, 4), b"HPUB": (4, 5), b"MSG": (4, 5), b"HMSG": (5, 6)}.get(op)
    if allowed is not None:
        sizes = words[-2:] if op.startswith(b"H") else words[-1:]
        if len(words) in allowed and all(number.isdigit() for number in sizes):
            size = int(words[-1]) + 2
        else:
            op = b""  # the server's to complain about
    return op, words, len(line), len(line) + size


def _headers(block: bytes) -> dict[str, str]:
    first, *lines = block.decode(errors="surrogateescape").split("\r\n")
    headers: dict[str, str] = {}
    status = first.removeprefix("NATS/1.0").strip()
    if status:
        headers["Status"], _, description = status.partition(" ")
        if description:
            headers["Description"] = description.strip()
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def without_urls(line: bytes) -> bytes:
    """The INFO line without the addresses of other ways to the server."""
    if b"connect_urls" not in line:
        return line
    info: dict[str, Any] = json.loads(line.split(maxsplit=1)[1])
    kept = {name: value for name, value in info.items() if name not in {"connect_urls", "ws_connect_urls"}}
    return b"INFO %b\r\n" % json.dumps(kept, separators=(",", ":")).encode()
