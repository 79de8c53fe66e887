from pathlib import Path

from skyrl_tinker.config import Settings
from skyrl_tinker.protocol.validation.key_limits import KeyLimits
from skyrl_tinker.server.shared_settings import ServerSettings


def test_a_host_changes_some_keys_of_a_table_and_has_the_server_s_others() -> None:
    server = Settings(keys=KeyLimits(models=3, sessions=5), max_lora_rank=16)
    shared = ServerSettings(Path("/server"), server.model_dump(mode="json", exclude={"home"}))
    joined = shared.joined(Settings(home="/host", keys={"models": 4}))
    assert joined.keys == KeyLimits(models=4, sessions=5)
    assert (joined.home, joined.max_lora_rank) == (Path("/host"), 16)
