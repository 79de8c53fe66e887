"""tinker:// paths, as the SDK reads and writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.types import ParsedCheckpointTinkerPath

from skyrl_tinker.domain import tinker_path
from skyrl_tinker.domain.ids import CheckpointKind, ModelId
from skyrl_tinker.domain.tinker_path import TinkerPath
from skyrl_tinker.errors import UserError

RUN = ModelId("3f1c:train:0")


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_a_path_reads_back_here_and_in_the_sdk(kind: CheckpointKind) -> None:
    path = TinkerPath(RUN, kind, "step-0001.a_b")
    assert str(path) == f"tinker://3f1c:train:0/{kind}/step-0001.a_b"
    assert tinker_path.parse(str(path)) == path
    assert tinker_path.parse_checkpoint_id(RUN, path.checkpoint_id) == path
    theirs = ParsedCheckpointTinkerPath.from_tinker_path(str(path))
    assert (theirs.training_run_id, theirs.checkpoint_id) == (RUN, path.checkpoint_id)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tinker://",
        "tinker://run",
        "tinker://run/weights",
        "tinker:///weights/a",
        "run/weights/a",
        "tinker://run/a/b",
    ],
)
def test_what_is_no_path_is_told_the_format(text: str) -> None:
    expected = r"expected tinker://<training run>/<weights\|sampler_weights\|external_weights>/<name>"
    with pytest.raises(UserError, match=f"{expected}|name is ''"):
        tinker_path.parse(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "a b", "ä", "a\n", "a" * 129, "a\x00"]
)
def test_names_that_could_leave_their_directory_or_confuse_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="checkpoint name is"):
        tinker_path.validate_checkpoint_name(name)


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True))
def test_every_allowed_name_survives(name: str) -> None:
    assert (
        tinker_path.parse(f"tinker://{RUN}/weights/{name}").name
        == tinker_path.validate_checkpoint_name(name)
        == name
    )
