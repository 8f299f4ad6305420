"""The two checks of arguments: what they let through, what they refuse, and what they say."""

import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from isoreg.checks import did_you_mean, in_range, one_of

KNOWN = (None, "gaussian", "ustat")


@pytest.mark.parametrize("value", KNOWN)
def test_one_of_returns_what_is_known(value):
    assert one_of("correction", value, KNOWN) is value


@pytest.mark.parametrize(
    "value, choices, message",
    [
        ("bootstrap", KNOWN, "correction: 'bootstrap' is unknown; use None, 'gaussian' or 'ustat'"),
        (
            "gausian",
            KNOWN,
            "correction: 'gausian' is unknown; did you mean 'gaussian'? use None, 'gaussian' or 'ustat'",
        ),
        (None, ("a", "b"), "correction: None is unknown; use 'a' or 'b'"),
        (True, (1, 2), "correction: True is unknown; use 1 or 2"),
        (1, (True, False), "correction: 1 is unknown; use True or False"),
        (["a"], ("a",), "correction: ['a'] is unknown; use 'a'"),
        (np.eye(3), KNOWN, "correction: ndarray of shape (3, 3) is unknown; use None, 'gaussian' or 'ustat'"),
        (torch.eye(3), KNOWN, "correction: Tensor of shape (3, 3) is unknown; use None, 'gaussian' or 'ustat'"),
    ],
)
def test_one_of_says_what_is_unknown(value, choices, message):
    with pytest.raises(ValueError) as error:
        one_of("correction", value, choices)
    assert str(error.value) == message


def test_one_of_takes_any_series_and_names_what_else_there_is():
    assert one_of("kind", "b", {"a": 1, "b": 2}) == "b" and one_of("order", np.int64(4), (2, 4)) == 4
    with pytest.raises(ValueError, match="use 'a', 'b' or a file$"):
        one_of("kind", "file", {"a": 1, "b": 2}, also="a file")


@pytest.mark.parametrize(
    "value, bounds, more",
    [
        (0, (0, 1), {}),
        (1, (0, 1), {}),
        (0, (0, 1), {"ends": "[)"}),
        (1, (0, 1), {"ends": "(]"}),
        (0.5, (0, 1), {"ends": "()"}),
        (np.float32(0.5), (0, 1), {}),
        (np.int64(3), (1,), {"whole": True}),
        (Fraction(1, 3), (0, 1), {}),
        (-1e300, (), {}),
        (None, (0, 1), {"optional": True}),
        (10**400, (1,), {"whole": True}),
    ],
)
def test_in_range_returns_what_lies_there(value, bounds, more):
    assert in_range("p", value, *bounds, **more) is value


@pytest.mark.parametrize(
    "value, bounds, more, message",
    [
        (1.2, (0, 1), {}, "p: 1.2 is out of range; need a number in [0, 1]"),
        (0, (0, 1), {"ends": "(]"}, "p: 0 is out of range; need a number in (0, 1]"),
        (1, (0, 1), {"ends": "[)"}, "p: 1 is out of range; need a number in [0, 1)"),
        (math.nan, (0, 1), {}, "p: nan is out of range; need a number in [0, 1]"),
        (math.nan, (), {}, "p: nan is out of range; need a finite number"),
        (math.inf, (), {}, "p: inf is out of range; need a finite number"),
        (-math.inf, (), {}, "p: -inf is out of range; need a finite number"),
        (math.inf, (0,), {}, "p: inf is out of range; need a number of at least 0"),
        (0, (0,), {"ends": "()"}, "p: 0 is out of range; need a number above 0"),
        (3, (-math.inf, 2), {}, "p: 3 is out of range; need a number of at most 2"),
        (2, (-math.inf, 2), {"ends": "()"}, "p: 2 is out of range; need a number below 2"),
        (True, (0, 1), {}, "p: True is not a number; need a number in [0, 1]"),
        ("1", (0, 1), {}, "p: '1' is not a number; need a number in [0, 1]"),
        (Decimal(1), (0, 1), {}, "p: Decimal('1') is not a number; need a number in [0, 1]"),
        (None, (0, 1), {}, "p: None is not a number; need a number in [0, 1]"),
        (2.0, (1,), {"whole": True}, "p: 2.0 is not a whole number; need a whole number of at least 1"),
        (
            0,
            (1,),
            {"whole": True, "optional": True, "hint": "20 is usual"},
            "p: 0 is out of range; need a whole number of at least 1 or None; 20 is usual",
        ),
        (0.5, (), {"whole": True}, "p: 0.5 is not a whole number; need a whole number"),
        (torch.eye(2), (0, 1), {}, "p: Tensor of shape (2, 2) is not a number; need a number in [0, 1]"),
    ],
)
def test_in_range_says_what_is_wrong(value, bounds, more, message):
    with pytest.raises(ValueError) as error:
        in_range("p", value, *bounds, **more)
    assert str(error.value) == message


def test_only_near_strings_are_proposed():
    assert did_you_mean("relesed", ("released", "text")) == "did you mean 'released'? "
    assert did_you_mean("paper", ("released", "text")) == did_you_mean(3, ("released", 2)) == ""


def test_the_checks_load_nothing():
    code = "import sys, isoreg.checks; print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
