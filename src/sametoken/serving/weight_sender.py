"""A trainer's side of updates, over a process group or in its memory (docs/rollouts.md)."""

from __future__ import annotations

import base64
import ipaddress
import itertools
import json
import pickle
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from sametoken.distributed.nccl import new_unique_id
from sametoken.distributed.shared_memory import share
from sametoken.distributed.trainer_group import TrainerGroup
from sametoken.errors import WeightUpdateError, in_words
from sametoken.io.bearer import bearer
from sametoken.models.load.adapter import NOT_AN_ADAPTER, config_text
from sametoken.models.load.sent import named_tensor
from sametoken.types.weight_updates import GLOO, IPC, NCCL, Rendezvous

#: Tensors of one request, so that its body stays small.
_AT_ONCE = 1000
#: Seconds for what takes no work: to say who one is, and to connect.
_QUICKLY_S = 10.0
_OWN_ADDRESS = "give an address of this host at which its servers reach it"


class WeightSender:
    """Sends weights to servers: their order over HTTP, their values over a process group.

    With "ipc" the servers read them in this process's memory, so all are on its GPU or host.

    Args:
        urls: of servers that were started with this backend.
        address, port: of this process, as the servers reach it; of meaning with "gloo" alone.
        backend: "gloo", "nccl" or "ipc".
        api_key: of the servers.
        timeout_s: seconds to wait for a server.

    Raises:
        ConfigError: no header can hold the key.
        WeightUpdateError: there is no server, a server refuses, or does not come in time; or the
            port is taken, or the address is not that of this process.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        address: str = "127.0.0.1",
        port: int = 51216,
        backend: str = GLOO,
        api_key: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._urls = _each_once(urls)
        self._headers = {"Content-Type": "application/json"} | bearer(api_key)
        self._timeout_s = timeout_s
        for url in self._urls:
            self._require_backend(url, backend)
        if backend == GLOO:
            _require_met(address, port)
            require_no_other_host(self._urls, address)
        self._shares = backend == IPC
        self._group = None if self._shares else self._join(backend, address, port)
        # Shared memory, until the servers have read it.
        self._kept: list[object] = []
        if self._shares:
            self._post_all("init_weight_transfer_engine", [{"init_info": {}}] * len(self._urls))

    def _require_backend(self, url: str, backend: str) -> None:
        """Refuse a server that would not join: the group would wait for it in vain."""
        answer = self._ask(f"{url}/server_info")
        try:
            theirs = json.loads(answer)["vllm_config"]["weight_transfer_config"]["backend"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"{url} is no server of sametoken", "check the URL") from error
        if theirs != backend:
            raise WeightUpdateError(
                f"{url} takes weights by {theirs!r}, and this trainer sends them by {backend!r}",
                "give both the same backend",
            )

    def _join(self, backend: str, address: str, port: int) -> TrainerGroup:
        world_size = len(self._urls) + 1
        unique_id = new_unique_id() if backend == NCCL else None
        at = Rendezvous(backend, address, port, 0, world_size, self._timeout_s, unique_id=unique_id)
        bodies = [
            {"init_info": _place(at) | {"rank_offset": 1 + i, "world_size": world_size}}
            for i in range(len(self._urls))
        ]
        group: TrainerGroup = self._post_all(
            "init_weight_transfer_engine", bodies, lambda: TrainerGroup(at)
        )
        return group

    def send(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int | None = None,
        *,
        target: str = "model",
    ) -> None:
        """Update every server; each of them takes all of the weights or none.

        Args:
            weights: every tensor of the checkpoint by its Hugging Face name; none may change
                before the end.
            version: of the new weights; default the next.
            target: "model" or "drafter".

        Raises:
            WeightUpdateError: one is no dense tensor with its values; a server refuses them, or
                is gone. After a failure on the way, make a new sender.
        """
        start = "start_weight_update" if target == "model" else "start_draft_weight_update"
        self._send((start, {}), weights, ("finish_weight_update", {"weight_version": version}))

    def send_adapter(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> None:
        """Give every server a LoRA adapter, in place of one of its name; otherwise as ``send``.

        Args:
            name: by which requests choose it.
            tensors: as PEFT's ``get_peft_model_state_dict`` returns them.
            config: as ``LoraConfig.to_dict`` returns it.
        """
        named = {"lora_name": name}
        try:
            plain = json.loads(config_text(config))
            pairs = dict(tensors).items()
        except (TypeError, ValueError) as error:
            raise WeightUpdateError(*NOT_AN_ADAPTER) from error
        start = "start_lora_update", named | {"lora_config": plain}
        self._send(start, pairs, ("finish_lora_update", named))

    def _send(
        self,
        start: tuple[str, dict[str, Any]],
        weights: Iterable[tuple[str, Tensor]],
        finish: tuple[str, dict[str, Any]],
    ) -> None:
        """Send tensors between two requests, each a path and a body, to every server."""
        if self._group is None and not self._shares:
            raise WeightUpdateError("an update failed, and its group is left", "make a new sender")
        every = len(self._urls)
        self._post_all(start[0], [start[1]] * every)
        # A tensor that fails between the servers' requests and the group would leave them waiting.
        tensors = map(named_tensor, weights)
        try:
            while part := list(itertools.islice(tensors, _AT_ONCE)):
                self._send_part(part)
            self._post_all(finish[0], [finish[1]] * every)
        finally:
            self._kept.clear()

    def _send_part(self, part: Sequence[tuple[str, Tensor]]) -> None:
        info = {
            "names": [name for name, _ in part],
            "dtype_names": [str(one.dtype).removeprefix("torch.") for _, one in part],
            "shapes": [list(one.shape) for _, one in part],
        }
        if self._shares:
            # A handle may be opened once, so each server gets its own.
            bodies = [{"update_info": info | self._handles(part)} for _ in self._urls]
            self._post_all("update_weights", bodies)
            return
        bodies = [{"update_info": info}] * len(self._urls)
        assert self._group is not None
        try:
            self._post_all("update_weights", bodies, lambda: self._broadcast(part))
        except WeightUpdateError:
            # Servers leave it too, and the next sender may take its port.
            self._group.leave()
            self._group = None
            raise

    def _handles(self, part: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
        """The tensors' places in memory, as vLLM's trainers send them."""
        kept, handles = share([tensor for _, tensor in part])
        self._kept.append(kept)
        return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles, 4)).decode()}

    def _broadcast(self, part: Sequence[tuple[str, Tensor]]) -> None:
        assert self._group is not None
        for _, tensor in part:
            self._group.broadcast(tensor.detach().to(self._group.device).contiguous())

    def _post_all(
        self, path: str, bodies: Sequence[dict[str, Any]], work: Callable[[], Any] = lambda: None
    ) -> Any:
        """The result of work in the group while the servers answer; their refusals come first."""
        urls = [f"{url}/{path}" for url in self._urls]
        result, failure = None, None
        with ThreadPoolExecutor(len(urls)) as pool:
            answers = [pool.submit(self._ask, *pair) for pair in zip(urls, bodies, strict=True)]
            try:
                result = work()
            except WeightUpdateError as error:
                failure = error
            for answer in answers:
                answer.result()
        if failure is not None:
            raise failure
        return result

    def _ask(self, url: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        timeout_s = self._timeout_s if body is not None else min(self._timeout_s, _QUICKLY_S)
        try:
            request = urllib.request.Request(url, data, self._headers)
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            told = error.read().decode("utf-8", "replace")
            raise WeightUpdateError(f"{url} answered {error.code}: {told}") from error
        except (OSError, ValueError, HTTPException) as error:
            raise WeightUpdateError(
                f"{url} does not answer ({in_words(error).strip()})", "check the URL, then its log"
            ) from error


def _each_once(urls: Sequence[str]) -> list[str]:
    found = [url.rstrip("/") for url in urls]
    if isinstance(urls, str) or not found or len(set(found)) < len(found):
        raise WeightUpdateError(
            f"urls={urls!r} is no list of servers", "give each server's URL once"
        )
    return found


def _require_met(address: str, port: int) -> None:
    """Refuse a place where this process is not met, before servers wait for it there."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        if port == 0:
            raise OSError("servers would not find it")
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise WeightUpdateError(
            f"port {port} of this host cannot be taken ({in_words(error)})", "give another port"
        ) from error
    with listener:
        listener.settimeout(_QUICKLY_S)
        try:
            if not address:
                raise OSError("it is empty")
            socket.create_connection((address, port), _QUICKLY_S).close()
            listener.accept()[0].close()
        except (OSError, UnicodeError) as error:
            raise WeightUpdateError(
                f"address={address!r} does not lead to this process ({in_words(error)})",
                _OWN_ADDRESS,
            ) from error


def require_no_other_host(urls: Sequence[str], address: str) -> None:
    """Refuse an address that means every host itself, if a server is on another one.

    Raises:
        WeightUpdateError: names the server.
    """
    # Not what a name is resolved to: a host's own may be a loopback on that host alone.
    if address != "localhost" and not _is_own(address):
        return
    for url in urls:
        if _is_elsewhere(url):
            raise WeightUpdateError(
                f"address={address!r} means the host that asks, and {url} is on another",
                _OWN_ADDRESS,
            )


def _is_own(address: str) -> bool:
    """Whether an address means the same host to every host."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def _is_elsewhere(url: str) -> bool:
    """Whether a server is known to be on another host; behind a proxy it is not."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), _QUICKLY_S) as connected:
            own, theirs = connected.getsockname()[0], connected.getpeername()[0]
    except OSError:
        return False
    # A host reaches itself from the address that it asks for, or from another loopback.
    return own != theirs and not _is_own(theirs)


def _place(at: Rendezvous) -> dict[str, Any]:
    if at.unique_id is not None:
        return {"nccl_unique_id_b64": base64.b64encode(at.unique_id).decode()}
    return {"master_address": at.address, "master_port": at.port}
