"""Whose requests are answered, and what a browser is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.server.guard import HEADERS
from tests.runtime.asking import image
from tests.runtime.server.conftest import Served, png, question

Serve = Callable[..., Served]


def test_a_token_is_asked_for_where_there_is_one(serve: Serve) -> None:
    served = serve(token="secret-ü")
    right = {"Authorization": "Bearer secret-ü".encode().decode("latin-1")}
    for path in ("/v1/models", "/metrics"):
        assert served.ask("GET", path, headers=right)[0] == 200
        for wrong in (
            {},
            {"Authorization": "secret-ü"},
            {"Authorization": "Bearer secret"},
            {"Authorization": "Bearer "},
        ):
            status, headers, answer = served.ask("GET", path, headers=wrong)
            assert (status, answer["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert served.chat(question("what"))[0] == 401
    assert served.chat(question("what", max_tokens=1), **right)[0] == 200
    assert [served.ask("GET", path)[0] for path in ("/", "/healthz")] == [200, 200]
    assert served.worker.here == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:80", "LOCALHOST"])
def test_this_machines_names_are_answered(served: Served, host: str) -> None:
    assert served.ask("GET", "/v1/models", headers={"Host": host})[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil", "[", ""])
def test_another_name_that_leads_here_is_refused(served: Served, host: str) -> None:
    assert served.ask("GET", "/v1/models", headers={"Host": host})[0] in (400, 403)


def test_elsewhere_any_name_leads_here(serve: Serve) -> None:
    served = serve(local=False)
    assert served.ask("GET", "/v1/models", headers={"Host": "cam.example"})[0] == 200


def test_another_sites_page_may_not_ask(served: Served) -> None:
    own = {"Origin": served.url}
    assert served.chat(question("what", max_tokens=1), **own)[0] == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
        status, headers, answer = served.chat(question("what"), Origin=origin)
        assert (status, answer["error"]["code"]) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in headers


def test_every_response_has_the_headers(served: Served) -> None:
    for path in ("/", "/healthz", "/v1/models", "/none"):
        told = served.ask("GET", path)[1]
        assert {name: told[name.lower()] for name in HEADERS} == HEADERS
        assert "server" not in told
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_metrics(serve: Serve) -> None:
    served = serve()
    for tokens in (3, 4):
        assert served.chat(question("what is it", max_tokens=tokens, model="bundle:loose"))[0] == 200
    assert served.chat(question("what is it", png(image(1)), max_tokens=3))[0] == 200
    assert served.chat(b"{")[0] == 400
    assert served.ask("GET", "/secret")[0] == 404
    rows = served.ask("GET", "/metrics")[2].decode().splitlines()
    values = {key: float(value) for key, value in (row.rsplit(" ", 1) for row in rows if not row.startswith("#"))}
    own = [served.levels.open("loose").generate("what is it", [], tokens) for tokens in (3, 4)]
    level = '{level="loose"}'
    assert values[f"unicache_generated_tokens_total{level}"] == sum(len(each.tokens) for each in own)
    assert values[f"unicache_prompt_tokens_total{level}"] == sum(each.stats.prompt_tokens for each in own)
    assert values[f"unicache_kv_bytes_sum{level}"] == sum(each.stats.kv_bytes for each in own)
    assert values[f"unicache_kv_bytes_uncompressed_sum{level}"] == sum(each.stats.kv_bytes_uncompressed for each in own)
    assert values[f"unicache_answer_seconds_count{level}"] == values[f"unicache_waiting_seconds_count{level}"] == 2
    kept = served.levels.open("tight").generate("what is it", [image(1)], 3).stats.visual_tokens
    assert values['unicache_visual_tokens_total{level="tight"}'] == kept > 1
    chat = 'unicache_responses_total{path="/v1/chat/completions",status='
    assert (values[chat + '"200"}'], values[chat + '"400"}']) == (3, 1)
    assert values['unicache_responses_total{path="other",status="404"}'] == 1
    assert values["unicache_queue_length"] == 0


def test_what_the_monitor_counts(serve: Serve) -> None:
    served = serve()
    before = served.levels.open("tight").monitor.counters.requests
    assert served.chat(question("what", max_tokens=2))[0] == 200
    rows = served.ask("GET", "/metrics")[2].decode()
    assert f'unicache_monitor_requests_total{{level="tight"}} {before + 1:.1f}\n' in rows
    assert 'unicache_monitor_repetition_alarms_total{level="tight"}' in rows
