"""docs/http.md says what the code says."""

from __future__ import annotations

import html
import re
from pathlib import Path

from effectfence.web.idempotency import (
    OUTCOMES,
    POLICY_PATH,
    PROBLEMS,
    VERDICTS,
    Policy,
    Routes,
    policy_page,
)

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text("utf-8")


def between(name: str) -> list[str]:
    inner = PAGE.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0]
    return inner.splitlines()


def problem_rows() -> list[str]:
    ran = {True: "true", False: "false", None: "null"}
    return [
        f'| <a id="{kind.slug}"></a>`#{kind.slug}` | {kind.status} | `{ran[kind.ran]}` '
        f"| {kind.title} | {kind.advice} |"
        for kind in PROBLEMS.values()
    ]


def test_the_table_of_problems_is_the_codes() -> None:
    assert between("problems")[2:] == problem_rows()


def test_the_table_of_outcomes_is_the_codes() -> None:
    said = dict(re.findall(r"^\| `(.+)` \| `(.+)` \|$", "\n".join(between("outcomes")), re.M))
    assert said == {**OUTCOMES, "validation": "release"}
    assert [line.split() for line in str(Policy()).splitlines()] == [
        list(row) for row in said.items()
    ]


def test_the_verdicts_mean_what_the_code_says() -> None:
    assert between("verdicts") == [f"* `{name}`: {means}" for name, means in VERDICTS.items()]


def test_the_page_names_the_defaults() -> None:
    policy = Policy()
    assert f"`wait_seconds` ({policy.wait_seconds:g})" in PAGE
    assert f"{policy.max_request_bytes >> 20} MiB" in PAGE
    assert f"{policy.max_response_bytes >> 10} KiB" in PAGE
    assert POLICY_PATH in PAGE


def test_the_served_page_has_an_anchor_for_every_problem_and_a_row_for_every_route() -> None:
    routes = Routes(
        Policy(result_ttl=60.0),
        {"POST /a/{id}": Policy(required=True), "/open": None, "/<b>": Policy()},
    )
    served = policy_page(routes, None).decode()
    for kind in PROBLEMS.values():
        assert f'<h2 id="{kind.slug}">' in served
        assert html.escape(kind.advice) in served
    assert "POST /a/{id}" in served
    assert "/open" not in served
    assert "<b>" not in served
    assert "60 seconds" in served
    assert "required" in served
    assert "ever" in served


PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_programs_of_the_page_run() -> None:
    for program in PROGRAMS:
        exec(program, {"__name__": "page"})
    assert len(PROGRAMS) == 4


if __name__ == "__main__":
    print("\n".join(problem_rows()))
