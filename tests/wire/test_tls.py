"""The gRPC server over TLS with a real client: who is let in, and what is in use after files were replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from extproc.settings import ServiceTlsSettings
from extproc.wire.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.wire.server import Server
from extproc.wire.tls import CertificateError, server_credentials
from tests.certificates import Mounted, tls_of, write


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    """Certificates of one authority."""
    return Mounted(tmp_path / "mounted")


@asynccontextmanager
async def serving(tls: ServiceTlsSettings, **more: str) -> AsyncIterator[Server]:
    """A server on a free port; only its health is asked."""
    server = Server("127.0.0.1:0", None, None, max_body_bytes=1024, tls=tls, **more)  # type: ignore[arg-type]
    await server.start()
    try:
        yield server
    finally:
        await server._server.stop(None)


async def health(port: int, trusted: grpc.ChannelCredentials | None, name: str = "localhost") -> str:
    """What the health service tells, or how asking it failed, on a connection of its own."""
    where, options = (
        f"127.0.0.1:{port}",
        [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)],
    )
    channel = grpc.aio.secure_channel(where, trusted, options) if trusted else grpc.aio.insecure_channel(where)
    async with channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            return HealthCheckResponse.ServingStatus.Name((await check(HealthCheckRequest(), timeout=120)).status)
        except grpc.RpcError as error:
            return str(error.code().name)


def shown(files: Mounted, client: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
    """A client that trusts the files' authority, and shows a certificate: that of the files, or `client`."""
    chain, key = Path(files.path("client.pem")).read_bytes(), Path(files.path("client.key")).read_bytes()
    if client is not None:
        chain, key = client.cert_chain_pems[0].bytes(), client.private_key_pem.bytes()
    return grpc.ssl_channel_credentials(files.ca.cert_pem.bytes(), key, chain)


async def test_who_is_let_in(files: Mounted) -> None:
    """Who shows a certificate of the authority, and nobody else; a client refuses a name that is not the server's."""
    async with serving(ServiceTlsSettings(**tls_of(files))) as server:
        assert await health(server.port, shown(files)) == "SERVING"
        nothing_shown = grpc.ssl_channel_credentials(files.ca.cert_pem.bytes())
        strange = trustme.CA().issue_cert("envoy.example")
        for stranger in (None, nothing_shown, shown(files, strange)):
            assert await health(server.port, stranger) == "UNAVAILABLE"
        assert await health(server.port, shown(files), "other.example") == "UNAVAILABLE"


async def test_without_a_clients_authority_everybody_is_let_in(files: Mounted) -> None:
    """But not in plain."""
    tls = {key: path for key, path in tls_of(files).items() if not key.startswith("client")}
    async with serving(ServiceTlsSettings(**tls)) as server:
        assert await health(server.port, grpc.ssl_channel_credentials(files.ca.cert_pem.bytes())) == "SERVING"
        assert await health(server.port, None) == "UNAVAILABLE"


async def test_renewed_files_are_in_use_with_the_next_connection(
    files: Mounted, caplog: pytest.LogCaptureFixture
) -> None:
    """After the link was swapped: the server's own and the clients' authority. A half of a renewal is not taken, and
    neither are files that are gone.
    """
    async with serving(ServiceTlsSettings(**tls_of(files))) as server:
        before = shown(files)
        assert await health(server.port, before) == "SERVING"
        old = files.ca
        files.renew(old, key_of_before=True)
        assert await health(server.port, before) == "SERVING"
        assert "the certificates of before stay in use" in caplog.text
        assert await health(server.port, before) == "SERVING"
        files.renew()
        assert await health(server.port, shown(files)) == "SERVING"
        assert await health(server.port, before) == "UNAVAILABLE"
        now = shown(files)
        (files.folder / "..data").unlink()
        assert await health(server.port, now) == "SERVING"


async def test_probes_that_know_no_tls_have_a_port_that_tells_health_alone(files: Mounted) -> None:
    """Nothing else is served there, and it is told by the same loop."""
    async with serving(ServiceTlsSettings(**tls_of(files)), health="127.0.0.1:0") as server:
        assert await health(server.health_port, None) == "SERVING"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel:
            call = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
        await server.stop()
        assert await health(server.health_port, None) == "UNAVAILABLE"


def test_files_that_cannot_be_used_at_first_are_said(files: Mounted, tmp_path: Path) -> None:
    """With their names."""
    usable = tls_of(files)
    _, other_key = write(files.ca.issue_cert("localhost"), tmp_path, "other")
    (tmp_path / "empty.pem").touch()
    for key, path in (
        ("cert_file", "/nowhere.pem"),
        ("key_file", other_key),
        ("client_ca_file", tmp_path / "empty.pem"),
    ):
        with pytest.raises(CertificateError, match=Path(path).name):
            server_credentials(ServiceTlsSettings(**{**usable, key: str(path)}))
