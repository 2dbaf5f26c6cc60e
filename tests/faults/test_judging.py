"""The judge notices faults: a module whose cases leave a bad checkpoint fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.fleet import Crew, members
from tests.faults.judging import judging


def test_a_module_that_leaves_a_checkpoint_with_the_state_of_another_step_fails_at_its_end(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[]], **places) as (member,):
        crew = Crew(root, [member.node, member.node], environment=places)
        for step in (1, 2):
            crew.all("save", step=step)
        crew.dismiss()
    with judging(root):
        pass
    # Whole by every checksum, and still not what was saved at that step.
    shutil.copytree(root / "step_1", root / "step_7")
    with pytest.raises(AssertionError, match=r"stock torch reads it: \['step_7'\]"), judging(root):
        pass
    shutil.rmtree(root / "step_7")
    (root / "step_1" / "__0_0.distcp").unlink()
    with pytest.raises(AssertionError, match="step_1"), judging(root):
        pass
