"""Who has the token sees the runs that were named, and nothing else of the machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mrl.errors import DataError
from mrl.watch import app as watch_app
from mrl.watch import search
from mrl.watch.app import make_app
from tests.support.run_folders import metrics_row, sample_row, write_run

TOKEN, COOKIE = "a-token", "mrl_watch"


def client_of(*folders: Path, with_token: bool = True) -> TestClient:
    client = TestClient(make_app(folders, token=TOKEN, cookie=COOKIE), follow_redirects=False)
    if with_token:
        client.cookies.set(COOKIE, TOKEN)
    return client


def append(folder: Path, name: str, *rows: dict[str, Any] | str) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = [
        sample_row(step, 10 * step + n, index) for step in range(1, 31) for n in (0, 1) for index in (0, 1)
    ]
    return write_run(tmp_path / "run", metrics=map(metrics_row, range(1, 4)), samples=samples)


def test_the_token_is_asked_for_and_becomes_a_cookie(folder: Path) -> None:
    client = client_of(folder, with_token=False)
    addresses = (
        "/",
        "/?token=",
        "/?token=a-toke",
        "/feed",
        "/samples",
        "/prompt",
        "/feed?token=b",
        "/nothing",
    )
    assert {client.get(address).status_code for address in addresses} == {403}
    assert client.get("/", headers={"cookie": f"{COOKIE}=other"}).status_code == 403
    let_in = client.get(f"/?token={TOKEN}&run=run")
    assert (let_in.status_code, let_in.headers["location"]) == (303, "/?run=run"), "without the token"
    set_here = let_in.headers["set-cookie"].lower()
    assert "httponly" in set_here and "samesite=lax" in set_here
    assert client.get("/").status_code == 200 and client.get("/nothing").status_code == 404


def test_nothing_can_be_written(folder: Path) -> None:
    client = client_of(folder)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for address in ("/", "/feed", "/samples", "/prompt"):
            assert client.request(method, address).status_code == 405
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert client.get("/").status_code == 200
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "name", ["../other", "..", "/etc", "%2e%2e%2fother", "run/../../other", "other", "", "run/", "\x00"]
)
def test_a_folder_that_was_not_named_is_not_read(folder: Path, name: str) -> None:
    write_run(folder.parent / "other", metrics=[metrics_row(1)], samples=[sample_row(1, 1)])
    client = client_of(folder)
    for address in ("/", "/feed", "/samples"):
        assert client.get(address, params={"run": name}).status_code == 404
    assert client.get("/prompt", params={"of": name, "number": 0, "limit": 5}).status_code == 404
    for path in (
        "/../other/metrics.jsonl",
        "/%2e%2e/other/metrics.jsonl",
        "/run/metrics.jsonl",
        "//etc/passwd",
    ):
        assert client.get(path).status_code == 404


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "stolen": 7, "prompt": "stolen"}\n')
    folder = write_run(tmp_path / "runs/run", metrics=[metrics_row(1)], config=None)
    for name in ("samples.jsonl", "config.yaml", "summary.json"):
        (folder / name).symlink_to(secret)
    os.mkfifo(folder / "versions.json")
    (tmp_path / "runs/away").symlink_to(tmp_path)
    client = client_of(tmp_path / "runs")
    said = client.get("/feed").text + client.get("/samples").text + client.get("/").text
    assert "stolen" not in said and '"samples.jsonl is not there."' in said
    assert "config.yaml cannot be read." in said and "versions.json cannot be read." in said


def test_every_answer_has_the_headers_of_the_page(folder: Path) -> None:
    for client in (client_of(folder), client_of(folder, with_token=False)):
        for address in ("/", "/feed", "/nothing"):
            headers = client.get(address).headers
            policy = headers["content-security-policy"]
            assert (
                policy.startswith("default-src 'none'; connect-src 'self'; ")
                and "frame-ancestors 'none'" in policy
            )
            assert len(re.findall("script-src 'sha256-[^']+' 'sha256-[^']+'; ", policy)) == 1
            assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
            assert headers["referrer-policy"] == "no-referrer"


def test_the_feed_has_what_was_appended_and_nothing_where_that_is_nothing(folder: Path) -> None:
    client = client_of(folder)
    data = client.get("/feed").json()
    (run,) = data["runs"]
    assert (run["curves"]["step"], run["samples"]["seen"], data["live"]["behind"]) == ([1, 2, 3], 120, 0)
    version = {"version": data["live"]["version"]}
    assert client.get("/feed", params=version).status_code == 204
    append(folder, "metrics", metrics_row(4), '{"step": 5, "reward')
    append(folder, "samples", sample_row(31, 400))
    newer = client.get("/feed", params=version).json()
    (run,) = newer["runs"]
    assert (run["curves"]["step"], run["samples"]["seen"]) == ([1, 2, 3, 4], 121)
    assert "metrics.jsonl: its last row is not whole: it is being written, or was cut." in run["notes"]
    assert client.get("/feed", params={"version": newer["live"]["version"]}).status_code == 204
    append(folder, "metrics", '/mean": 1.0}\n')
    (run,) = client.get("/feed").json()["runs"]
    assert run["curves"]["step"] == [1, 2, 3, 4, 5] and not any("not whole" in note for note in run["notes"])


def test_a_large_file_is_read_in_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_app, "SLICE", 2000)
    client, seen = client_of(folder), []
    while True:
        data = client.get("/feed").json()
        seen.append(data["runs"][0]["samples"]["seen"])
        if not data["live"]["behind"]:
            break
    assert len(seen) > 5 and seen == sorted(seen) and seen[-1] == 120


def test_samples_are_found_by_column_range_and_text(folder: Path) -> None:
    client = client_of(folder)
    client.get("/feed")

    def found(**asked: Any) -> dict[str, Any]:
        return client.get("/samples", params=asked).json()

    everything = found()
    assert (everything["fitting"], len(everything["rows"]), everything["looked"]) == (120, 100, 100)
    assert [row["step"] for row in everything["rows"]][:5] == [30, 30, 30, 30, 29]
    ends = ".".join(map(str, everything["next"]["ends"]))
    append(folder, "samples", sample_row(31, 400))
    client.get("/feed")
    rest = found(ends=ends, skip=everything["next"]["skip"])
    numbers = [row["number"] for row in everything["rows"] + rest["rows"]]
    assert sorted(numbers) == list(range(120)) and rest["next"] is None, "what came later shifts nothing"
    some = found(
        domain="maths", **{"step-from": 10, "step-to": 12, "reward-from": 1, "response_tokens-to": 120}
    )
    assert [(row["step"], row["domain"], row["reward"]) for row in some["rows"]] == [
        (11, "maths", 1.0), (10, "maths", 1.0),
    ]  # fmt: skip
    assert [row["prompt"] for row in found(text="QUESTION 301")["rows"]] == ["question 301"] * 2
    assert found(domain="none")["fitting"] == 0
    for bad in ({"step-from": "x"}, {"step-to": "nan"}, {"ends": "1.2"}, {"ends": "1", "skip": "1e99"}):
        assert client.get("/samples", params=bad).status_code == 400


def test_a_long_search_goes_on_where_it_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(folder)
    client.get("/feed")
    full = search.list_samples

    def none_in_time(*asked: Any) -> dict[str, Any]:
        return full(*asked, seconds=-1.0)

    monkeypatch.setattr(watch_app, "list_samples", none_in_time)
    asked, found = {"text": "question 10"}, []
    for looked in range(1, 121):
        answer = client.get("/samples", params=asked).json()
        found += [row["prompt"] for row in answer["rows"]]
        assert answer["looked"] == looked
        if answer["next"] is None:
            break
        asked |= {"ends": ".".join(map(str, answer["next"]["ends"])), "skip": answer["next"]["skip"]}
    assert sorted(set(found)) == ["question 10", "question 100", "question 101"] and answer["looked"] == 120


def test_the_samples_of_a_prompt_are_whole_and_from_all_runs(tmp_path: Path) -> None:
    folders = [
        write_run(
            tmp_path / name, samples=[sample_row(1, 7, index, response="long " * 200) for index in (0, 1)]
        )
        for name in ("one", "two")
    ]
    client = client_of(*folders)
    client.get("/feed")
    asked = {"of": "two", "number": 1, "limit": 3, "run": ["one", "two"]}
    answer = client.get("/prompt", params=asked).json()
    assert [(row["run"], row["number"]) for row in answer["rows"]] == [("two", 1), ("one", 0), ("one", 1)]
    assert answer["total"] == 4 and answer["rows"][0]["response"] == "long " * 200
    assert client.get("/prompt", params=asked | {"number": 99}).json() == {"rows": [], "total": 0}


def test_folders_of_runs_are_listed_and_new_ones_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, name in enumerate(("old", "new")):
        run = write_run(tmp_path / "runs" / name, metrics=[metrics_row(1)], config=None)
        os.utime(run / "metrics.jsonl", (at, at))
    (tmp_path / "runs/empty").mkdir()
    client = client_of(tmp_path / "runs")
    live = client.get("/feed").json()["live"]
    assert ([run["name"] for run in live["listed"]], live["shown"]) == (["new", "old"], ["new"])
    write_run(tmp_path / "runs/later", metrics=[metrics_row(1)])
    monkeypatch.setattr(watch_app, "LIST_SECONDS", -1.0)
    both = client.get("/feed", params={"run": ["old", "later"]}).json()
    assert both["live"]["shown"] == ["old", "later"] == [run["name"] for run in both["runs"]]
    with pytest.raises(DataError, match="is no run folder and has none in it"):
        client_of(tmp_path / "runs/empty")
