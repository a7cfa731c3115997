"""A pytest plugin for recorded runs: one shard of the tests, on one kernel family, and a summary.

    python -m pytest -p flash_ext.testing.sharding --shard 1/2 --summary summary.json

The summary is rewritten after every test, so a crash of the process loses nothing; a test that was
started and never finished stays in it as `running`.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_ext.testing.forced import forced
from flash_ext.testing.shards import parse_shard, shard_of

LONGEST_REASON = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sharding")
    group.addoption("--shard", default="1/1", help="i/n: run the i-th of n parts of the tests")
    group.addoption("--summary", default=None, help="JSON file to write the outcome to")
    group.addoption("--kernel-family", default=None, help="tests marked gpu run on it alone")
    group.addoption(
        "--stop-after", type=float, default=None, help="seconds; later tests stay unrun"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        index, count = parse_shard(config.getoption("--shard"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.pluginmanager.register(
        Shard(index, count, config.getoption("--summary"), config.getoption("--stop-after")),
        "flash_ext_shard",
    )


@pytest.fixture(autouse=True)
def kernel_family(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked gpu run on the kernels of --kernel-family, if it is given."""
    family = request.config.getoption("--kernel-family")
    if family is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with forced(family=family):
        yield


class Shard:
    """Selects the tests of one shard and keeps their outcome."""

    def __init__(self, index: int, count: int, summary: str | None, stop_after: float | None):
        self.index, self.count = index, count
        self.summary = Path(summary) if summary else None
        self.deadline = None if stop_after is None else time.monotonic() + stop_after
        self.selected = 0
        self.outcomes: dict[str, str] = {}  # test id -> passed, failed, skipped or running
        self.reasons: Counter[str] = Counter()  # why tests were skipped

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        mine: list[pytest.Item] = []
        others: list[pytest.Item] = []
        for item in items:
            here = shard_of(item.nodeid, self.count) == self.index
            (mine if here else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = mine

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected counts as one failed test."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = len(session.items) + len(self.outcomes)
        self.write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcomes[nodeid] = "running"
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown report in turn; the worst of them is the test's outcome."""
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.reasons[str(why).removeprefix("Skipped: ")[:LONGEST_REASON]] += 1
        elif report.when == "call" and self.outcomes[report.nodeid] == "running":
            self.outcomes[report.nodeid] = "passed"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self) -> None:
        self.write()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):  # type: ignore[no-untyped-def]
        result = yield
        if self.deadline is not None and time.monotonic() > self.deadline:
            item.session.shouldstop = "the time of this shard is up"
        return result

    def write(self) -> None:
        if self.summary is None:
            return
        outcomes = Counter(self.outcomes.values())
        summary = {
            "passed": outcomes["passed"],
            "failed": sorted(test for test, how in self.outcomes.items() if how == "failed"),
            "skipped": outcomes["skipped"],
            "skip_reasons": dict(sorted(self.reasons.items())),
            "running": [test for test, how in self.outcomes.items() if how == "running"],
            "not_run": self.selected - len(self.outcomes),
        }
        self.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
