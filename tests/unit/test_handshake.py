"""The first reply of a server is looked at before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hsdump.engines import handshake as handshakes
from hsdump.engines.handshake import HELLO_TOKENS, Offer, _check_widths, handshake
from hsdump.errors import ServerError, SpoolError
from hsdump.locks import AliveLock
from hsdump.sglang.announce import Announcement
from hsdump.sglang.hooks import ServerCapture
from hsdump.spool.names import Rid, SpoolPaths, new_run
from hsdump.spool.ring import RingWriter
from hsdump.spool.writer import SpoolWriter
from tests.standin import JsonHandler, serving
from tests.unit.test_driver import INFO

OUR_PORT, THEIR_PORT = 30001, 30002


class Host:
    """Two servers' spools on one host: ours hands over files, theirs a ring that somebody is reading."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = folder / "hsdump-1", folder / "hsdump-2"
        Announcement(self.ours).offer(replace(INFO, spool_dir=str(self.ours)), host="", port=OUR_PORT)
        ring = SpoolPaths(self.theirs).ring(1)
        Announcement(self.theirs).offer(
            replace(INFO, hand_over="ring", rings=1), host="", port=THEIR_PORT, ring=ring.name
        )
        RingWriter(ring, INFO.shape, 1 << 16)
        self.their_client = AliveLock(SpoolPaths(self.theirs).ring_lock)

    def serve(self, *, port: int | None, captures: bool = True) -> type[JsonHandler]:
        """Give an HTTP face that names this port of its own, or none, behind a URL with yet another port."""
        spool = SpoolWriter(self.ours, INFO.shape, max_bytes=1 << 20, keep_free_bytes=0)

        class Handler(JsonHandler):
            def do_GET(self) -> None:  # noqa: N802 - the base class names it so
                self.send({"model_path": "/nowhere", **({"port": port} if port else {})})

            def do_POST(self) -> None:  # noqa: N802 - the base class names it so
                rid = Rid.parse(self.body()["rid"])
                assert rid is not None
                if captures:
                    spool.publish(spool.begin(rid))
                self.send({})

        return Handler


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(handshakes, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(handshakes, "HELLO_WAIT_S", 0.1)
    with ExitStack() as stack:
        host = Host(tmp_path)
        stack.callback(host.their_client.release)
        yield host


@pytest.mark.parametrize("port", [OUR_PORT, None, 30009])
def test_another_servers_ring_that_is_in_use_is_nothing_to_us(host: Host, port: int | None) -> None:
    with serving(host.serve(port=port)) as url:
        info, end = handshake(url, new_run())
    end.close()
    assert info.spool_dir == str(host.ours)


def test_a_server_that_says_its_port_is_looked_for_nowhere_else(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "RingHandOver", None)  # opening theirs would keep their clients out meanwhile
    with serving(host.serve(port=OUR_PORT)) as url:
        handshake(url, new_run())[1].close()


@pytest.mark.parametrize("port", [THEIR_PORT, None])
def test_a_server_whose_ring_is_in_use_is_refused_with_that(host: Host, port: int | None) -> None:
    with serving(host.serve(port=port, captures=False)) as url, pytest.raises(SpoolError, match="another run is"):
        handshake(url, new_run())


def test_a_plugin_that_gave_up_before_it_knew_its_port_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server(JsonHandler):
        def do_GET(self) -> None:  # noqa: N802 - the base class names it so
            self.send({"model_path": "/nowhere", "port": OUR_PORT})

    monkeypatch.setattr(handshakes, "SHARED_MEMORY", tmp_path)
    ServerCapture(tmp_path / "hsdump-1").give_up("hsdump's hooks could not be registered: Unsupported: no such forward")
    with serving(Server) as url, pytest.raises(ServerError, match=r"no live announcement .*Unsupported: no such forw"):
        handshake(url, new_run())


@pytest.mark.parametrize("widths", [[(4, 8)] * 3, [(4, 8)] * 3 + [(4, 16)], [(3, 8)] * 4])
def test_states_of_another_number_or_width_are_refused_with_both(widths: list[tuple[int, ...]]) -> None:
    offer = Offer(Path("/dev/shm/x"), 1, INFO, None, None)
    with pytest.raises(ServerError, match=r"announces 4 states of \[4, 8\] for 4 tokens and hands over"):
        _check_widths("http://h:1", offer, widths)
    _check_widths("http://h:1", offer, [(HELLO_TOKENS, 8)] * 4)
