"""The six product folders lie at the root and are imported as ``hbmtwin.<name>`` through relative links."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("folder", ["sim", "allocators", "kernels", "workloads", "validation", "dashboard"])
def test_each_folder_is_linked_from_the_package(folder: str) -> None:
    link = ROOT / "hbmtwin" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert (ROOT / folder / "__init__.py").is_file()
