"""The lab's network: a switch (a bridge in a namespace of its own) and one cable (a veth pair) to each host.

The bridge lies in a namespace of its own so that no setting of the machine has to change: a Docker engine on the
machine sets the FORWARD policy to DROP, and bridged packets of the machine's own namespace would pass through it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.lab.system import run


@dataclass(frozen=True)
class Network:
    """Names and addresses; `number` tells two labs on one machine apart (10.NUMBER... stay apart, too)."""

    number: int = 77

    @property
    def prefix(self) -> str:
        """What every namespace and link of this lab begins with."""
        return f"gsl{self.number}"

    @property
    def switch(self) -> str:
        """The switch's network namespace."""
        return f"{self.prefix}-sw"

    @property
    def machine_link(self) -> str:
        """The machine's own end of its cable to the switch."""
        return f"{self.prefix}-0"

    def namespace(self, host: int) -> str:
        """Return a host's network namespace."""
        return f"{self.prefix}-h{host}"

    def address(self, host: int) -> str:
        """Return a host's IPv4 address; the machine's own is `machine_address`."""
        return f"10.{self.number}.0.{10 + host}"

    def address6(self, host: int) -> str:
        """Return a host's IPv6 address."""
        return f"fd00:{self.number}::{10 + host}"

    @property
    def machine_address(self) -> str:
        """The machine's IPv4 address on the lab's network."""
        return f"10.{self.number}.0.1"

    @property
    def machine_address6(self) -> str:
        """The machine's IPv6 address on the lab's network."""
        return f"fd00:{self.number}::1"

    # -- the switch ---------------------------------------------------------------------------------------------

    def make_switch(self) -> None:
        """Make the switch and the machine's cable to it where they are missing."""
        if self.switch not in namespaces():
            run(["ip", "netns", "add", self.switch])
        if "br0" not in links(self.switch):
            run(["ip", "-n", self.switch, "link", "add", "br0", "type", "bridge"])
        run(["ip", "-n", self.switch, "link", "set", "br0", "up"])
        if self.machine_link not in links() or "machine" not in links(self.switch):
            run(["ip", "link", "del", self.machine_link], check=False)
            peer = ["peer", "name", "machine", "netns", self.switch]
            run(["ip", "link", "add", self.machine_link, "type", "veth", *peer])
            self._plug("machine")
            self._address(None, self.machine_link, self.machine_address, self.machine_address6)

    def remove_switch(self) -> None:
        """Remove the switch, the machine's cable and any namespace of this lab that is left."""
        if self.machine_link in links():
            run(["ip", "link", "del", self.machine_link], check=False)
        for name in self.namespaces():
            run(["ip", "netns", "del", name])

    def namespaces(self) -> list[str]:
        """Return the network namespaces of this lab that exist."""
        return [name for name in namespaces() if name.startswith(f"{self.prefix}-")]

    # -- the hosts' cables --------------------------------------------------------------------------------------

    def connect(self, host: int) -> None:
        """Make a host's network namespace, with a loopback and an `eth0` that is plugged into the switch."""
        name = self.namespace(host)
        run(["ip", "netns", "add", name])
        run(["ip", "-n", name, "link", "set", "lo", "up"])
        peer = ["peer", "name", f"h{host}", "netns", self.switch]
        # Always the same hardware address: a rebuilt host must not be a stranger in its neighbours' tables.
        mac = f"02:00:00:{self.number:02x}:00:{host:02x}"
        run(["ip", "link", "add", "eth0", "netns", name, "address", mac, "type", "veth", *peer])
        self._plug(f"h{host}")
        self._address(name, "eth0", self.address(host), self.address6(host))

    def disconnect(self, host: int) -> None:
        """Remove a host's network namespace and its cable."""
        if f"h{host}" in links(self.switch):
            run(["ip", "-n", self.switch, "link", "del", f"h{host}"], check=False)
        if self.namespace(host) in namespaces():
            run(["ip", "netns", "del", self.namespace(host)])

    def connected(self, host: int) -> bool:
        """Tell whether a host has both its namespace and its cable."""
        return self.namespace(host) in namespaces() and f"h{host}" in links(self.switch)

    def cut(self, host: int, *, silent: bool = False) -> None:
        """Cut a host's cable; `silent` takes it out of the switch instead, so that neither side sees a link go down."""
        change = ["nomaster"] if silent else ["down"]
        run(["ip", "-n", self.switch, "link", "set", f"h{host}", *change])

    def heal(self, host: int) -> None:
        """Undo `cut` and `degrade`."""
        run(["tc", "-n", self.switch, "qdisc", "del", "dev", f"h{host}", "root"], check=False)
        self._plug(f"h{host}")

    def degrade(self, host: int, *netem: str) -> None:
        """Make what goes to a host slow or lossy: `degrade(2, "delay", "100ms", "loss", "5%")` (tc-netem's words)."""
        run(["tc", "-n", self.switch, "qdisc", "replace", "dev", f"h{host}", "root", "netem", *netem])

    def _plug(self, port: str) -> None:
        run(["ip", "-n", self.switch, "link", "set", port, "master", "br0", "up"])

    def _address(self, namespace: str | None, link: str, address: str, address6: str) -> None:
        where = ["-n", namespace] if namespace else []
        run(["ip", *where, "addr", "add", f"{address}/24", "dev", link])
        run(["ip", *where, "addr", "add", f"{address6}/64", "dev", link, "nodad"])
        run(["ip", *where, "link", "set", link, "up"])


def namespaces() -> list[str]:
    """Return the machine's named network namespaces."""
    said = run(["ip", "-json", "netns", "list"]).stdout
    return [entry["name"] for entry in json.loads(said or "[]")]


def links(namespace: str | None = None) -> list[str]:
    """Return the links of a network namespace, none where it does not exist."""
    where = ["-n", namespace] if namespace else []
    done = run(["ip", *where, "-json", "link"], check=False)
    return [entry["ifname"] for entry in json.loads(done.stdout or "[]")] if done.returncode == 0 else []
