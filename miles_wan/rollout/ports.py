"""Free ports for servers that start at the same time. A port is reserved for the life of this process under a name in the
kernel that other processes of this project see, so two engines never choose the same one between looking and binding.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from miles_wan.errors import EngineError

_RANGE = range(20000, 32000)  # below the range from which Linux gives ports to outgoing connections
_ATTEMPTS = 400


class PortLease:
    """``count`` neighbouring free ports on 127.0.0.1, held until ``release`` (or the end of the process)."""

    def __init__(self, count: int = 1) -> None:
        for first in _candidates(count):
            self._names = _reserve(range(first, first + count))
            if self._names:
                self.ports = tuple(range(first, first + count))
                return
        raise EngineError(f"no {count} free neighbouring ports between {_RANGE.start} and {_RANGE.stop}")

    @property
    def first(self) -> int:
        return self.ports[0]

    def release(self) -> None:
        for name in self._names:
            name.close()


def _candidates(count: int) -> Iterator[int]:
    chooser = random.SystemRandom()  # the seeded generators of a run must not decide about ports
    for _ in range(_ATTEMPTS):
        yield chooser.randrange(_RANGE.start, _RANGE.stop - count)


def _reserve(ports: range) -> list[socket.socket]:
    """Abstract Unix sockets that stand for the ports; empty if one is taken."""
    names: list[socket.socket] = []
    try:
        for port in ports:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            names.append(name)
            name.bind(f"\0miles_wan.port.{port}")
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind(("0.0.0.0", port))
    except OSError:
        for name in names:
            name.close()
        return []
    return names
