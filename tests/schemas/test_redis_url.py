"""The URL of Redis in settings: the URL, or the path of a private file that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config_loading import load_config
from headrace.schemas.settings.redis_url import current_url, without_password


def url_of(text: str) -> str:
    return load_config(None, {"redis.url": text})[0].redis.url


def test_a_private_file_holds_the_url_and_its_tls_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("redis-writer.url")
    path.touch(mode=0o600)
    path.write_text("rediss://me:a%2Fword@host:1/0?ssl_ca_certs=ca.pem&ssl_certfile=/etc/c.pem&db=2\n")
    absolute = f"rediss://me:a%2Fword@host:1/0?ssl_ca_certs={tmp_path}/ca.pem&ssl_certfile=/etc/c.pem&db=2"
    assert url_of("redis-writer.url") == url_of(f"file:{path.absolute()}") == f"file:{path.absolute()}"
    assert current_url(url_of("redis-writer.url")) == url_of(absolute) == absolute
    assert "a%2Fword" not in load_config(None, {"redis.url": "redis-writer.url"})[0].model_dump_json()
    assert without_password(url_of("redis-writer.url")) == absolute.replace("a%2Fword", "***")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"redis\.url: others may read redis-writer\.url \(mode 0640\).*chmod 600"):
        url_of("redis-writer.url")


@pytest.mark.parametrize("text", ["me:s3cret@host:6379/0", "s3cret", "/s3cret/missing.url"])
def test_an_error_about_an_invalid_url_or_path_does_not_show_it(text: str) -> None:
    with pytest.raises(ConfigError, match="or the path of a file that has such a URL, and there is none") as caught:
        url_of(text)
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"


def test_a_file_without_a_url_is_refused_and_its_content_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text("s3cret\n")
    with pytest.raises(ConfigError, match="should have one line with a URL") as caught:
        url_of(str(path))
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"
    with pytest.raises(ConfigError, match="cannot be read"):
        url_of(str(tmp_path))


def test_an_error_about_a_url_that_is_no_text_does_not_show_it() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: should be a valid string") as caught:
        load_config(None, {"redis.url": ["redis://:s3cret@host"]})
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize(
    "url", ["redis://me:s3cret", "redis://me:s3cr/et", "rediss://:s3cr#et", "redis://me:s3cr?et/0"]
)
def test_a_malformed_url_with_a_password_is_not_shown(url: str) -> None:
    assert without_password(url) == "(malformed URL)"


@pytest.mark.parametrize(
    "url", ["redis://localhost", "redis://localhost:6379/0", "rediss://[::1]:1/0", "redis://[::1]"]
)
def test_an_address_without_a_password_is_shown(url: str) -> None:
    assert without_password(url) == url
