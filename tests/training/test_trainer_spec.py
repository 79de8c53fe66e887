"""The environment of PyTorch's allocators in a rank."""

from dataclasses import replace

from skyrl_tinker.training.actors import allocator_settings
from skyrl_tinker.training.trainer_spec import TrainerSpec

ON_GPU = TrainerSpec("model", 1, "cuda", "bfloat16", 1, 64)
EXACT = "pinned_max_round_threshold_mb:1"


def test_pinned_memory_is_exact_and_segments_expand_where_samplers_do_not_map_them() -> None:
    assert allocator_settings(ON_GPU, {}) == {"PYTORCH_ALLOC_CONF": EXACT}
    spread = replace(ON_GPU, expandable_segments=True)
    assert allocator_settings(spread, {}) == {"PYTORCH_ALLOC_CONF": f"{EXACT},expandable_segments:True"}
    assert allocator_settings(replace(ON_GPU, device="cpu"), {}) == {}


def test_a_user_s_own_settings_come_last_and_count() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        found = allocator_settings(ON_GPU, {name: "max_split_size_mb:512"})
        assert found == {"PYTORCH_ALLOC_CONF": f"{EXACT},max_split_size_mb:512"}
