"""The pytest fixture `gradient_oracle`, there wherever gpt-parity is installed.

Nothing is imported before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def gradient_oracle() -> Callable[..., Any]:
    """Judge a function of loss and gradients; the test fails with the report if it is wrong.

    def test_backward(gradient_oracle):
        gradient_oracle(loss_and_gradients, "source", dtype="float32")

    Takes what `gpt_parity.oracle.check` takes, and returns its report.
    """
    __tracebackhide__ = True

    def judge(fn: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from gpt_parity.oracle.functions import check

        report = check(fn, *arguments, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return judge
