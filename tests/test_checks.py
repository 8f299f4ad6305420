"""The two checks of arguments: what they let through, what they refuse, and what they say."""

import math

import numpy as np
import pytest
import torch

from isoreg.checks import in_range, one_of

KNOWN = (None, "gaussian", "ustat")


@pytest.mark.parametrize("value", KNOWN)
def test_one_of_returns_what_is_known(value):
    assert one_of("correction", value, KNOWN) is value


UNKNOWN = [
    ("bootstrap", KNOWN, "'bootstrap' is unknown; use None, 'gaussian' or 'ustat'"),
    ("gausian", KNOWN, "'gausian' is unknown; did you mean 'gaussian'? use None, 'gaussian' or 'ustat'"),
    (None, ("a", "b"), "None is unknown; use 'a' or 'b'"),
    (True, (1, 2), "True is unknown; use 1 or 2"),
    (["a"], ("a",), "['a'] is unknown; use 'a'"),
    (torch.eye(3), KNOWN, "Tensor of shape (3, 3) is unknown; use None, 'gaussian' or 'ustat'"),
]


@pytest.mark.parametrize("value, choices, message", UNKNOWN)
def test_one_of_says_what_is_unknown(value, choices, message):
    with pytest.raises(ValueError) as error:
        one_of("correction", value, choices)
    assert str(error.value) == f"correction: {message}"


def test_one_of_takes_any_series_and_names_what_else_there_is():
    assert one_of("kind", "b", {"a": 1, "b": 2}) == "b" and one_of("order", np.int64(4), (2, 4)) == 4
    with pytest.raises(ValueError, match="use 'a', 'b' or a file$"):
        one_of("kind", "file", {"a": 1, "b": 2}, also="a file")


def test_in_range_returns_what_lies_there():
    for value in (0, 0.5, 1, np.float32(0.5)):
        assert in_range("p", value, 0, 1) is value
    assert in_range("p", 0, 0, 1, ends="[)") == 0 and in_range("p", 1, 0, 1, ends="(]") == 1
    assert in_range("p", None, 0, 1, optional=True) is None and in_range("p", np.int64(3), 1, whole=True) == 3


OUTSIDE = [
    (1.2, (0, 1), {}, "1.2 is out of range; need a number in [0, 1]"),
    (0, (0, 1), {"ends": "(]"}, "0 is out of range; need a number in (0, 1]"),
    (1, (0, 1), {"ends": "[)"}, "1 is out of range; need a number in [0, 1)"),
    (math.nan, (0, 1), {}, "nan is out of range; need a number in [0, 1]"),
    (math.inf, (), {}, "inf is out of range; need a number in (-inf, inf)"),
    (True, (0, 1), {}, "True is not a number; need a number in [0, 1]"),
    ("1", (0, 1), {}, "'1' is not a number; need a number in [0, 1]"),
    (None, (0, 1), {}, "None is not a number; need a number in [0, 1]"),
    (2.0, (1, 9), {"whole": True}, "2.0 is not a whole number; need a whole number in [1, 9]"),
    (0, (1, 9), {"optional": True}, "0 is out of range; need a number in [1, 9] or None"),
    (0, (1, 9), {"hint": "5 is usual"}, "0 is out of range; need a number in [1, 9]; 5 is usual"),
    (torch.eye(2), (0, 1), {}, "Tensor of shape (2, 2) is not a number; need a number in [0, 1]"),
]


@pytest.mark.parametrize("value, bounds, more, message", OUTSIDE)
def test_in_range_says_what_is_wrong(value, bounds, more, message):
    with pytest.raises(ValueError) as error:
        in_range("p", value, *bounds, **more)
    assert str(error.value) == f"p: {message}"
