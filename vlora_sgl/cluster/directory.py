"""The directory of a fleet: what its fronts share.

There is one. It knows the replicas, which tell it that they live; it loads adapters on them, gives adapters their
homes by the counts that the fronts send, and tells the fronts all of it. Requests do not pass through it. If it ends,
the fronts go on with what they know, and the next one has everything from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from vlora_sgl.cluster import status, uploads
from vlora_sgl.cluster.directory_link import BEAT_S
from vlora_sgl.cluster.links import FLEET, NotSent, Refused
from vlora_sgl.cluster.placement import Affinity
from vlora_sgl.cluster.replica import Replica
from vlora_sgl.cluster.replica_router import Router
from vlora_sgl.cluster.supervisor import say
from vlora_sgl.core import JsonDict
from vlora_sgl.errors import ClusterError

SILENT_S = 5.0
"""Who has not been heard of for so long is gone."""
SUSPECT_S = 1.5
"""While a replica has not been heard of for so long, a new one waits: it may be to have its number and homes."""
SETTLE_S, SETTLE_AGAIN_S, SETTLE_MORE_S = 2.0, 10.0, 0.5
"""How long a new directory waits for a front that knows more before it lets replicas join: if the fleet is new, if a
replica had a number before, and once a front has told what it knows (another may know more)."""
AWAY_S = 60.0
"""For so long adapters keep their homes on a replica that has ended; others serve them meanwhile."""


class Known(Replica):
    """A replica as the directory sees it: its requests are the fronts'.

    Attributes:
        key: tells it from the one that has its number next.
        heard: when it last said that it lives.
        joining: brings its adapters in line.
    """

    waiting = 0

    def __init__(self, number: int, url: str, key: str) -> None:
        super().__init__(number, url, limit=0)
        self.key, self.heard = key, time.monotonic()
        self.joining: asyncio.Task[None] | None = None


class Directory(Router):
    """Speaks the routes that concern a cluster as a whole, and its own below ``FLEET``.

    Args:
        args, options: of ``Router``, less the replicas.
    """

    replicas: list[Known]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__([], *args, **options)
        self.identity, self.version, self._told = secrets.token_hex(4), 0, ""
        self._fronts: dict[str, JsonDict] = {}
        self._heard: dict[str, float] = {}
        self._totals = Counter(sent_again=0, lost=0)
        self._restored = 0
        self._away: dict[int, float] = {}
        self._settles = time.monotonic() + SETTLE_S
        self._again = False

    def mount(self, app: web.Application) -> None:
        """Add the routes about the cluster as a whole, and those for its parts."""
        super().mount(app)
        for answer in (self.join, self.leave, self.sync, self.refill, self.home, self.bring):
            app.router.add_post(FLEET + answer.__name__, _told(answer))
        uploads.mount(app, self.catalogue)

    async def watch(self) -> None:
        """Forget who is silent, until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            if now - last > 2 * BEAT_S:  # it was this process that could not listen
                for replica in self.replicas:
                    replica.heard += now - last
                self._heard = {name: heard + now - last for name, heard in self._heard.items()}
            last = now
            for replica in [replica for replica in self.replicas if now - replica.heard > SILENT_S]:
                say(f"replica {replica.number} at {replica.url} is silent")
                self._forget(replica)
            for name in [name for name, heard in self._heard.items() if now - heard > SILENT_S]:
                del self._heard[name], self._fronts[name]
            self._count_requests()

    # Replicas

    async def join(self, told: JsonDict) -> JsonDict:
        """A replica lives, and had this number before, if any: its number now, whether it serves, its load."""
        if told["number"] is not None and not self._again:
            self._again = True
            self._settles += SETTLE_AGAIN_S - SETTLE_S if not self._restored else 0.0
        if time.monotonic() < self._settles:
            return {"number": told["number"], "serving": False, "load": 0}
        if told["number"] is None and self._awaits(told["key"]):
            return {"number": None, "serving": False, "load": 0}
        replica = self._known(told)
        replica.heard = time.monotonic()
        if not replica.serving and replica.joining is None:
            replica.joining = asyncio.create_task(self._let_in(replica))
        return {"number": replica.number, "serving": replica.serving, "load": replica.load}

    def _awaits(self, key: str) -> bool:
        """Whether a new replica comes while one that it may be in the place of is silent, and not yet given up."""
        now = time.monotonic()
        known = any(replica.key == key for replica in self.replicas)
        return not known and any(now - replica.heard > SUSPECT_S for replica in self.replicas)

    def _known(self, told: JsonDict) -> Known:
        """The replica of a key; a new one has the number it asks for, or the smallest that is free."""
        for replica in self.replicas:
            if replica.key == told["key"]:
                return replica
        taken = {replica.number for replica in self.replicas}
        number = told["number"]
        if number is None or number in taken:
            number = next(n for n in range(len(taken) + 1) if n not in taken)
        self._away.pop(number, None)
        replica = Known(number, told["url"], told["key"])
        self.replicas.append(replica)
        self.replicas.sort(key=lambda one: one.number)
        return replica

    async def _let_in(self, replica: Known) -> None:
        try:
            await self.ready(replica)
        except ClusterError as error:
            say(str(error))
            self._forget(replica)
        finally:
            replica.joining = None

    async def leave(self, told: JsonDict) -> JsonDict:
        """A replica takes no more requests, for now or for good; those that it has go on."""
        for replica in [replica for replica in self.replicas if replica.key == told["key"]]:
            self._forget(replica)
            if told["for_good"]:
                del self._away[replica.number]
        return {}

    def _forget(self, replica: Known) -> None:
        replica.end()
        if replica in self.replicas:
            self.replicas.remove(replica)
            self._away[replica.number] = time.monotonic()
        if replica.joining is not None and replica.joining is not asyncio.current_task():
            replica.joining.cancel()

    # Fronts

    async def sync(self, told: JsonDict) -> JsonDict:
        """What a front did since it last told; what others do, and all that is known, if that is news to it."""
        name, (identity, version) = told["front"], told["version"]
        self._fronts[name], self._heard[name] = told, time.monotonic()
        self._count_requests()
        self._totals.update({count: told[count] for count in self._totals})
        for replica in self.replicas:
            replica.served += told["served"].get(str(replica.number), 0)
        if isinstance(self.routing, Affinity) and self.replicas:
            away = [number for number, since in self._away.items() if time.monotonic() - since < AWAY_S]
            self.routing.count(told["counts"], [*away, *(replica.number for replica in self.serving)])
        known = self.known()
        if self._told != (text := json.dumps(known)):
            self._told, self.version = text, self.version + 1
        return {
            "version": [self.identity, self.version],
            "fronts": len(self._fronts),
            "elsewhere": {r.number: r.load - sum(told["loads"].get(str(r.number), ())) for r in self.replicas},
            "refill": identity not in ("", self.identity) and version > self._restored,
            "known": known if [identity, version] != [self.identity, self.version] and self._complete else None,
        }

    @property
    def _complete(self) -> bool:
        """Whether replicas have had the time to join."""
        return time.monotonic() > self._settles + 2 * BEAT_S

    def _count_requests(self) -> None:
        for replica in self.replicas:
            loads = [front["loads"].get(str(replica.number), (0, 0)) for front in self._fronts.values()]
            replica.running, replica.waiting = sum(load[0] for load in loads), sum(load[1] for load in loads)

    def known(self) -> JsonDict:
        """All that a front is told, and tells a new directory."""
        affinity = self.routing if isinstance(self.routing, Affinity) else None
        return {
            "replicas": [
                {"number": r.number, "url": r.url, "starts": r.starts, "loaded": r.loaded} for r in self.serving
            ],
            "homes": affinity.homes if affinity else {},
            "requests": affinity.requests if affinity else {},
            "catalogue": self.catalogue.state(),
            "totals": dict(self._totals),
        }

    async def refill(self, told: JsonDict) -> JsonDict:
        """A front tells what it has from the last directory; who has the newest is believed."""
        version, known = told["version"][1], told["known"]
        if version <= self._restored or (self._restored and time.monotonic() > self._settles) or self.replicas:
            return {}
        self._restored = self.version = version
        self.catalogue.take(known["catalogue"])
        self._totals = Counter(known["totals"])
        if isinstance(self.routing, Affinity):
            self.routing.homes = {name: tuple(homes) for name, homes in known["homes"].items()}
            self.routing.requests = known["requests"]
        self._settles = time.monotonic() + SETTLE_MORE_S
        return {"files": [*known["catalogue"]["files"]]}

    async def home(self, told: JsonDict) -> JsonDict:
        """Homes for an adapter that has none."""
        serving = await self.some()
        homes = self.routing.homes_of(told["adapter"], serving) if isinstance(self.routing, Affinity) else ()
        return {"homes": [*homes]}

    async def bring(self, told: JsonDict) -> JsonDict:
        """Load an adapter on a replica, unless it is there.

        Raises:
            ClusterError: that replica does not serve.
        """
        replica = next((one for one in self.serving if one.number == told["number"]), None)
        if replica is None:
            raise ClusterError(f"there is no replica {told['number']} now")
        await self.catalogue.bring([told["adapter"]], replica)
        return {}

    # What it says of the fleet

    def status(self) -> JsonDict:
        """As a router's, and the fronts."""
        return {**super().status(), "fronts": sorted(front["url"] for front in self._fronts.values())}

    async def metrics(self, request: web.Request) -> web.Response:
        """As a router's, and those of every replica that serves, labelled with its number."""
        text = status.metrics(self.replicas, self._counts())
        answers = await asyncio.gather(*map(self._metrics_of, self.serving))
        return web.Response(text=text + status.joined(answers), content_type="text/plain")

    async def _metrics_of(self, replica: Replica) -> tuple[int, str]:
        with contextlib.suppress(NotSent, Refused, TimeoutError):
            async with asyncio.timeout(BEAT_S * 10):
                return replica.number, (await self.links.order(replica, "GET", "/metrics")).decode()
        return replica.number, ""

    def _counts(self) -> dict[str, int]:
        return dict(self._totals)


def _told(answer: Callable[[JsonDict], Awaitable[JsonDict]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler for a message in JSON."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await answer(json.loads(await request.read())))

    return handler
