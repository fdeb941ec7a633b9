"""A local server that speaks S3, where the packages for it are installed."""

import contextlib

import pytest


@contextlib.contextmanager
def s3_bucket(monkeypatch):
    """The URL of a bucket. Skips without moto and s3fs."""
    server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    started.start()
    host, port = started.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    if not s3fs.S3FileSystem().exists("bucket"):  # all servers of a process have one memory
        s3fs.S3FileSystem().mkdir("bucket")
    try:
        yield "s3://bucket"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        started.stop()
