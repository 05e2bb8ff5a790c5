"""A version is told to engines that may be down just then: passing, with patience, and never without a word."""

import json
import logging
import urllib.request

import pytest
from scene import WAIT_S, EngineThread, ListSource

from strawq.errors import EngineUnavailable
from strawq_workers.rollout import close_rollouts, generate_rollout
from strawq_workers.rollout.engine_versions import set_engine_version
from strawq_workers.sglang.transport import Transport

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def refuses(monkeypatch):
    """`refuses(url, path, times)`: so many control calls of this engine find a closed port in its place."""
    left, usual = {}, Transport.control_status

    async def control_status(self, method, path, body=None, *, timeout_s=None):
        if left.get((self.url, path), 0) > 0:
            left[self.url, path] -= 1
            elsewhere = Transport(NOBODY, self.options)
            try:
                return await usual(elsewhere, method, path, body, timeout_s=timeout_s)
            finally:
                await elsewhere.close()
        return await usual(self, method, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(Transport, "control_status", control_status)

    def refuse(url, path, times):
        left[url, path] = times
        return lambda: left[url, path]

    return refuse


def serves(engine):
    with urllib.request.urlopen(f"{engine.url}/model_info", timeout=WAIT_S) as answer:
        return json.load(answer)["weight_version"]


def test_an_engine_that_is_down_for_a_moment_gets_the_version(engine, args_of, refuses, caplog):
    data, left = ListSource(), refuses(engine.url, "/update_weight_version", 3)
    with caplog.at_level(logging.WARNING):
        set_engine_version(args_of(), data, "7", warn=pytest.fail)
    assert left() == 0 and serves(engine) == "7"
    assert "version 7 is told again, for up to" in caplog.text and "Cannot connect" in caplog.text


def test_engines_that_stay_down_are_engine_unavailable_once_they_were_waited_for(engine, args_of, refuses):
    data, left = ListSource(), refuses(engine.url, "/update_weight_version", 1000)
    with pytest.raises(EngineUnavailable, match=r"version 7 was not told within \d+ s: .*Cannot connect"):
        set_engine_version(args_of(), data, "7", warn=pytest.fail)
    assert 1 < 1000 - left() < 100 and serves(engine) == "1"


def test_an_engine_that_stays_down_is_gone_on_without_while_another_has_the_version(engine, args_of, refuses, caplog):
    other = EngineThread()
    try:
        data = ListSource()
        refuses(other.url, "/update_weight_version", 1000)
        with caplog.at_level(logging.WARNING):
            set_engine_version(args_of(rollout_engines=[other.url, engine.url]), data, "7", warn=pytest.fail)
        assert (serves(engine), serves(other)) == ("7", "1")
        assert "going on without an engine: version 7 was not told" in caplog.text
    finally:
        close_rollouts()
        other.close()


def test_a_rollout_begins_though_an_engine_is_down_when_it_is_asked_for_its_version(engine, args_of, refuses):
    data = ListSource()
    generate_rollout(args_of(), 0, data)
    left, texts = refuses(engine.url, "/model_info", 1), refuses(engine.url, "/v1/tokenize", 2)
    assert len(generate_rollout(args_of(), 1, data).samples) == 3
    assert left() == texts() == 0
