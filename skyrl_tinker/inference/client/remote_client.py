"""The one way to the samplers: a routed data plane and a control plane that reaches every replica."""

from dataclasses import dataclass

from skyrl_tinker.inference.client.control_plane import ControlPlane
from skyrl_tinker.inference.client.data_plane import DataPlane


@dataclass
class RemoteInferenceClient(ControlPlane, DataPlane):
    """Picklable. `proxy_url` takes what any replica may serve, `server_urls` are all replicas."""

    def retarget(self, proxy_url: str, server_urls: tuple[str, ...]) -> None:
        """After a restart: the servers have other addresses."""
        self.proxy_url, self.server_urls = proxy_url, server_urls

    async def close(self) -> None:
        await self._http.close()
