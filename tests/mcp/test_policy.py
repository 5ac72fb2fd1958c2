"""The policy file: what it says is taken, and what it can't mean is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from effectfence.commands.printing import WrongUse
from effectfence.mcp.observe import NearDuplicates
from effectfence.mcp.policy import Policy, ToolPolicy

FULL = """
[defaults]
wait_seconds = 5
on_error = "unknown"

[tools.charge_card]
identity = ["order_id"]
ignore = ["request_id", "trace.id"]
secret = ["card.token"]
domain = "order:{order_id}"
result_ttl = "forever"
on_error = "release"

[tools."odd name"]
fence = false
result_ttl = 60
"""


def load(folder: Path, text: str) -> Policy:
    path = folder / "policy.toml"
    path.write_text(text)
    return Policy.load(str(path), ToolPolicy())


def test_a_tool_says_over_the_defaults_which_say_over_the_command_line(tmp_path: Path) -> None:
    policy = load(tmp_path, FULL)
    assert policy.of("anything") == ToolPolicy(wait_seconds=5, on_error="unknown")
    assert policy.of("charge_card") == ToolPolicy(
        identity=("order_id",),
        ignore=("request_id", "trace.id"),
        secret=("card.token",),
        domain="order:{order_id}",
        result_ttl=math.inf,
        wait_seconds=5,
        on_error="release",
    )
    assert policy.of("charge_card").unhashed == ("request_id", "trace.id", "card.token")
    assert policy.of("odd name").fence is False


def test_without_a_file_every_tool_has_the_defaults() -> None:
    defaults = ToolPolicy(wait_seconds=1)
    assert Policy.load(None, defaults).of("x") is defaults


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tools.pay]\nfense = true", "tools.pay.fense"),
        ("[tool.pay]\nfence = true", "'tool'"),
        ("[tools]\npay = 1", "tools.pay must be a table"),
        ("tools = 1", "tools must be a table"),
        ("[tools.pay]\nfence = 1", "tools.pay.fence must be true or false"),
        ("[tools.pay]\nidentity = 'order'", "tools.pay.identity must be a list"),
        ("[tools.pay]\nignore = [1]", "tools.pay.ignore must be a list"),
        ("[tools.pay]\nignore = ['']", "tools.pay.ignore must be a list"),
        ("[tools.pay]\ndomain = '{a}{b}'", "tools.pay.domain"),
        ("[tools.pay]\ndomain = ''", "tools.pay.domain"),
        ("[tools.pay]\nresult_ttl = 0", "tools.pay.result_ttl"),
        ("[tools.pay]\nresult_ttl = -1", "tools.pay.result_ttl"),
        ("[tools.pay]\nresult_ttl = nan", "tools.pay.result_ttl"),
        ("[tools.pay]\nresult_ttl = inf", "'forever'"),
        ("[tools.pay]\nresult_ttl = true", "tools.pay.result_ttl"),
        ("[tools.pay]\nresult_ttl = 'never'", "tools.pay.result_ttl"),
        ("[tools.pay]\nwait_seconds = -1", "tools.pay.wait_seconds"),
        ("[tools.pay]\nwait_seconds = inf", "tools.pay.wait_seconds"),
        ("[tools.pay]\non_error = 'retry'", "tools.pay.on_error"),
        ("[defaults]\non_error = 'retry'", "defaults.on_error"),
        ("this is no toml", "not TOML"),
    ],
)
def test_what_it_cannot_mean_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(WrongUse) as refused:
        load(tmp_path, text)
    assert named in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_file_that_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"none\.toml can't be read"):
        Policy.load(str(tmp_path / "none.toml"), ToolPolicy())


def test_bytes_that_are_no_text_are_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(WrongUse, match="not TOML"):
        Policy.load(str(tmp_path / "policy.toml"), ToolPolicy())


# --- near-duplicates ------------------------------------------------------------------------------


def test_calls_that_differ_in_one_place_are_told_of_once() -> None:
    near = NearDuplicates()
    charge = {"order": 1, "memo": "a", "card": {"token": "t1"}}
    assert near.seen("charge", charge, ()) == []
    assert near.seen("charge", {**charge, "memo": "b"}, ()) == ["/memo"]
    assert near.seen("charge", {**charge, "memo": "c"}, ()) == []
    assert near.seen("charge", {**charge, "card": {"token": "t2"}}, ()) == ["/card/token"]
    assert near.seen("other", {**charge, "memo": "d"}, ()) == []


def test_equal_calls_and_what_is_ignored_are_no_near_duplicates() -> None:
    near = NearDuplicates()
    for token in ("t1", "t2"):
        assert near.seen("charge", {"order": 1, "card": {"token": token}}, ("card.token",)) == []


def test_a_call_whose_only_argument_differs_is_another_call() -> None:
    near = NearDuplicates()
    assert near.seen("get", {"id": 1}, ()) == []
    assert near.seen("get", {"id": 2}, ()) == []


def test_a_member_that_only_one_has_is_a_difference() -> None:
    near = NearDuplicates()
    assert near.seen("pay", {"order": 1, "to": "x"}, ()) == []
    assert near.seen("pay", {"order": 1, "to": "x", "memo": None}, ()) == ["/memo"]


def test_the_readmes_example_is_a_policy(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme.split("```toml\n")[1].split("```")[0]
    assert load(tmp_path, example).of("charge_card").on_error == "unknown"
