"""Client of the samplers: a routed data plane and a control plane that reaches every replica."""

from dataclasses import dataclass, field

from skyrl_tinker.inference.client.data_plane import DataPlane
from skyrl_tinker.inference.client.fan_out import Locate, same_path
from skyrl_tinker.inference.client.http_connection import JsonHttp
from skyrl_tinker.inference.client.in_flight import InFlight
from skyrl_tinker.inference.client.sampling_port import Dialect, SamplerControl


@dataclass
class RemoteInferenceClient:
    """Picklable. `data` reaches any replica by `proxy_url`, `control` all of `server_urls`.

    `token`: required by the servers; empty: none. `locate`: names a directory for replicas on other hosts.
    `past_proxy`: samples go to the servers without the router. `dialect`: of their engine.
    """

    proxy_url: str
    server_urls: tuple[str, ...]
    token: str = field(default="", repr=False)
    locate: Locate = field(default=same_path, repr=False)
    past_proxy: bool = False
    dialect: Dialect = field(kw_only=True, repr=False)
    data: DataPlane = field(init=False, repr=False, compare=False)
    control: SamplerControl = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        http, in_flight, most = JsonHttp(self.token), InFlight(), self.dialect.most_sequences
        self.data = DataPlane(self.dialect, self.proxy_url, self._straight(), http, in_flight, most)
        self.control = self.dialect.control(self.server_urls, http, in_flight, locate=self.locate)

    def retarget(self, proxy_url: str, server_urls: tuple[str, ...]) -> None:
        """Replace the addresses, after members joined or left."""
        self.proxy_url = self.data.proxy_url = proxy_url
        self.server_urls = self.control.server_urls = server_urls
        self.data.straight = self._straight()

    def _straight(self) -> tuple[str, ...]:
        alone = self.server_urls == (self.proxy_url,)
        return self.server_urls if self.past_proxy or alone else ()

    async def close(self) -> None:
        await self.data.http.close()
