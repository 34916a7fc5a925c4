"""Addresses of judge servers: secrets are refused, and proxies are respected."""

from typing import Any

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.rewards.addresses import Proxy, proxy_of
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.samples import VerdictKind
from tests.support.judge_server import judge_server

LOOPBACK = ("127.0.0.1", "127.8.9.1", "localhost", "judge.localhost", "[::1]")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind.upper()}_PROXY", raising=False)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("proxy", ["http://proxy:3128", "socks5://user:secret@proxy:1080"])
def test_loopback_and_what_no_proxy_names_are_asked_directly(variable, proxy, monkeypatch) -> None:
    monkeypatch.setenv(variable, proxy)
    for host in LOOPBACK:
        assert proxy_of(f"http://{host}:8000/v1") is None
    if proxy.startswith("http"):
        assert proxy_of("http://judge:8000/v1") == Proxy(variable, proxy)
    else:
        with pytest.raises(
            ConfigError, match=f"^{variable} names a socks5 proxy.*add judge to NO_PROXY$"
        ) as error:
            proxy_of("http://judge:8000/v1")
        assert "secret" not in str(error.value)
    monkeypatch.setenv("NO_PROXY", "other,judge")
    assert proxy_of("http://judge:8000/v1") is None


def test_a_scheme_s_own_proxy_comes_before_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://all:1")
    monkeypatch.setenv("HTTPS_PROXY", "https:2")
    assert proxy_of("http://judge/v1") == Proxy("ALL_PROXY", "http://all:1")
    assert proxy_of("https://judge/v1") == Proxy("HTTPS_PROXY", "http://https:2")


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_judge_on_loopback_answers_in_spite_of_proxies(proxy, monkeypatch, make_pair, score_all) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(variable, proxy)
    with judge_server() as (url, _, _):
        section = RewardSection(kind="llm", path=url, deadline_seconds=60.0)
        with RewardPool(section) as pool:
            assert score_all(pool, [make_pair(0, "The sum is 12.", "12")])["0.0"].value == 1.0


def test_a_proxy_that_cannot_be_used_is_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, make_pair: Any, score_all: Any
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    section = RewardSection(kind="llm", path="http://judge.invalid", retries=0, deadline_seconds=60.0)
    with RewardPool(section) as pool:
        verdict = score_all(pool, [make_pair(0, "12", "12")])["0.0"]
    assert verdict.kind is VerdictKind.NO_REWARD
    assert "cannot start: ALL_PROXY names a socks5 proxy" in verdict.reason


@pytest.mark.parametrize("kind", ["llm", "reward_model"])
@pytest.mark.parametrize("user", ["user:secret@", "secret@", ":secret@"])
def test_an_address_with_a_password_is_refused_and_not_shown(kind: str, user: str) -> None:
    words = [f"reward.kind={kind}", f"reward.path=https://{user}judge:8000/v1"]
    with pytest.raises(ConfigError, match="path contains a user name or a password") as error:
        load(["configs/quickstart.yaml"], words)
    assert "secret" not in str(error.value)
    assert "server.api_key_env" in str(error.value)


@pytest.mark.parametrize("path", ["127.0.0.1:9", "ftp://a", "http:///v1"])
def test_an_address_is_one_of_http(path: str) -> None:
    with pytest.raises(ValueError, match="is an http:// or https:// address"):
        RewardSection(kind="llm", path=path)
