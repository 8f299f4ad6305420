"""Files that are whole or not there."""

import os
import stat

import numpy as np
import pytest

from isoreg.files import from_yaml, pack, to_yaml, unpack, write_atomically


def test_permissions_are_those_of_the_file_or_of_the_umask(tmp_path):
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "new", "first")
    assert mode(tmp_path / "new") == mode(tmp_path / "plain")
    for kept in (0o600, 0o664):
        (tmp_path / "new").chmod(kept)
        write_atomically(tmp_path / "new", "second")
        assert mode(tmp_path / "new") == kept and (tmp_path / "new").read_text() == "second"
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "strict", "first")
    finally:
        os.umask(before)
    assert mode(tmp_path / "strict") == 0o640


@pytest.mark.parametrize("kind, largest", [("int16", 2**15 - 1), ("int32", 2**15), ("int32", 2**31 - 1)])
def test_class_numbers_of_32_bits_come_back(kind, largest):
    packed = pack(np.array([0, largest, -1]))
    assert packed["kind"] == kind and unpack(packed).tolist() == [0, largest, -1]
    with pytest.raises(ValueError, match="predictions: a class number exceeds 32 bits"):
        pack(np.array([2**31]))


@pytest.mark.parametrize(
    "damage, why",
    [
        ({"data": "aGVsbG8="}, "incorrect header check"),
        ({"data": "@@@@"}, "base64"),
        ({"data": None}, "NoneType"),
        ({"rows": 4}, "3 rows, where 4 are named"),
        ({"kind": "O"}, "kind: 'O' is unknown; use 'int16', 'int32', 'float32' or 'json'"),
        ({"kind": "json"}, "Expecting value|decode"),
    ],
)
def test_damaged_predictions_are_called_so(damage, why):
    packed = pack(np.array([0.5, 1.5, 2.5]))
    assert unpack(packed).tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(ValueError, match=rf"predictions: cannot be read \(.*({why}).*\); give another record"):
        unpack(packed | damage)
    with pytest.raises(ValueError, match="predictions: cannot be read"):
        unpack({})


@pytest.mark.parametrize(
    "text, value",
    [
        ("[no, yes, on, Off]", ["no", "yes", "on", "Off"]),  # the labels of a task
        ("[true, False]", [True, False]),
        ("[010, 2024_01, 1_000, 12:30, 0x1F, 01.5]", ["010", "2024_01", "1_000", "12:30", "0x1F", "01.5"]),
        ("[1e-5, 2E-3, -.5, 3., 7, -0, +4]", [1e-5, 2e-3, -0.5, 3.0, 7, 0, 4]),
        ("[1e5, 1234567e12345678, 1.5e5, 1e+5]", [1e5, "1234567e12345678", 1.5e5, 1e5]),  # a digest is no number
        ("[2024-01-31, 2024-13-45]", ["2024-01-31", "2024-13-45"]),
        ("[~, null, '1', \"no\"]", [None, None, "1", "no"]),
        ("b: &b {x: 1, y: 2}\na: &a {<<: *b, x: 3}\nc: {<<: *a, y: 5}", {"c": {"x": 3, "y": 5}}),
    ],
)
def test_yaml_is_read_as_its_version_1_2_has_it(text, value):
    assert from_yaml(to_yaml(value)) == value
    found = from_yaml(text)
    assert repr({"c": found["c"]} if isinstance(found, dict) else found) == repr(value)


@pytest.mark.parametrize("text", ["x: 1\ny: 2\nx: 3", "a: {x: 1, 'x': 2}", "b: &b {x: 1}\na: {<<: *b, y: 1, y: 2}"])
def test_a_name_given_twice_is_refused(text):
    with pytest.raises(ValueError, match="[xy]: given twice in line [12] and below"):
        from_yaml(text)
