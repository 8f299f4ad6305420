"""Files that are whole or not there."""

import stat

import isoreg.files as files
from isoreg.files import write_atomically


def test_permissions_are_those_of_the_file_or_of_the_umask(tmp_path, monkeypatch):
    mode = lambda path: stat.S_IMODE(path.stat().st_mode)
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "new", "first")
    assert mode(tmp_path / "new") == mode(tmp_path / "plain")
    for kept in (0o600, 0o664):
        (tmp_path / "new").chmod(kept)
        write_atomically(tmp_path / "new", "second")
        assert mode(tmp_path / "new") == kept and (tmp_path / "new").read_text() == "second"
    monkeypatch.setattr(files, "_UMASK", 0o027)
    write_atomically(tmp_path / "strict", "first")
    assert mode(tmp_path / "strict") == 0o640
