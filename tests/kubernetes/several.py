"""Steps with several gateways: the ConfigMap of the ledger and the Lease of the election on the
real API server.

The gateways have the permissions that the chart gives with two replicas, so the objects have the
chart's names.
"""

import json
import signal
import time

from cluster import NAMESPACE, Failed, until
from gateway import CLIENTS, Balanced, Gateway, Load, ask
from node import PODS
from world import SETS, check, serves, statefulset

KEY = "sluice-ledger"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/{KEY}-leader"
LEDGER = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{KEY}"
LEASE_SECONDS = 10
# Maximum time until another gateway leads. It consists of a lease on a clock that is a tenth too
# slow, an eighth of a lease until the next look, and delays on two cores that other programs use.
SWITCH_SECONDS = LEASE_SECONDS * 1.1 + LEASE_SECONDS / 8 + 2
SLOTS = 8
# A stream of this many tokens takes three seconds. After one second, its gateway subtracts it from
# the load that the engine reports.
TOKENS = 60
SHORT_LEASE_SECONDS = 3


def several(world, step, pods, pool="", cluster="", state=None):
    """Starts two gateways with a new ledger and waits until each has a share of it."""
    for path in (LEASE, LEDGER):
        if world.cluster.exists(path):
            world.cluster.delete(path)
    tables = lambda name: f'{pool}\n[cluster]\nname = "{name}"\nkubernetes = {{}}\n{cluster}'
    gateways = [Gateway(world.folder, f"{step}-{name}", world.account, pods, tables(f"{step}-{name}"), state) for name in ("one", "two")]
    for gateway in gateways:
        until(f"{gateway.name} has a share", lambda: gateway.cluster().get("ready"), 60)
    return gateways


def leader_of(gateways, seconds=60):
    """The one gateway that leads, and the others."""
    def one():
        leading = [gateway for gateway in gateways if gateway.leads()]
        return leading if len(leading) == 1 else None

    first = until("one gateway leads", one, seconds, 0.02)[0]
    return first, [gateway for gateway in gateways if gateway is not first]


def ends(step, *gateways):
    """Runs a step, and stops the gateways even if it fails."""
    try:
        return step()
    finally:
        for gateway in gateways:
            gateway.stop()


def leader_is_killed(world, leader):
    world.apply(statefulset("led", 2))
    pods = 'selector = "app=led", statefulset = "led", args = { max-num-seqs = 64 }'
    gateways = several(world, leader, pods, cluster=f'leader = "{leader}"', state=leader)
    return ends(lambda: killed(world, leader, gateways), *gateways)


def killed(world, leader, gateways):
    first, [second] = leader_of(gateways)
    names = ["led-0", "led-1"]
    until("the engines are taken over", lambda: all(serves(first, name, 64) for name in names), 120)
    until("the gateways that shall are ready", lambda: first.is_ready() and second.is_ready() == (leader == "decides"))
    load = Balanced(gateways)
    load.served_by(names, {})
    seqs = {name: 64 for name in names}
    if leader == "decides":
        # The test kills the leader during a change of flags, which the other gateway has to
        # complete.
        code, text = first.sluice("backend", "restart", "p/led-1", "--set", "max-num-seqs=48")
        check(code == 0, text)
        until("the pod is deleted", lambda: world.cluster.call("GET", f"{PODS}/led-1")[1]["metadata"].get("deletionTimestamp"), 30, 0.02)
        seqs["led-1"] = 48
    load.gap = 0.0
    began = time.monotonic()
    first.stop(signal.SIGKILL)
    until("the other one leads", second.leads, SWITCH_SECONDS, 0.02)
    led = time.monotonic() - began
    until("it is ready", second.is_ready)
    load.served_by(names, load.since())
    gap = load.gap
    until("it has the engines", lambda: all(serves(second, name, seqs[name]) for name in names), 60)
    code, text = second.sluice("backend", "restart", "p/led-1", "--set", "max-num-seqs=32", "--wait")
    check(code == 0 and serves(second, "led-1", 32), text)
    spec = world.cluster.get(LEASE)["spec"]
    check(spec["holderIdentity"].startswith(second.name) and spec["leaseTransitions"] == 1, spec)

    # The killed gateway comes back as a standby, and leads at once when the other is asked to stop.
    first.process.start()
    until("it has a share again", lambda: first.cluster().get("ready"))
    check(not first.leads(), "two lead")
    code, text = first.sluice("backend", "restart", "p/led-1", "--set", "max-num-seqs=64", "--wait")
    check(code != 0 and "not_leading" in text and second.name in text, text)
    cut = dict(load.cut)
    began = time.monotonic()
    second.process.process.send_signal(signal.SIGTERM)
    until("the first one leads", first.leads, LEASE_SECONDS, 0.02)
    handed = time.monotonic() - began
    until("it is ready", first.is_ready)
    load.served_by(names, load.since())
    streams, lost = load.stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    # Only streams that had begun at the killed gateway are cut. A gateway that is asked to stop
    # cuts none.
    check(load.cut == cut and set(cut) <= {first.name} and sum(cut.values()) <= CLIENTS, load.cut)
    return (f"{led:.1f} s until the standby leads, {gap:.1f} s without an end of a stream; {handed:.1f} s after a SIGTERM; "
            f"{streams} streams, 0 lost, {sum(cut.values())} cut that had begun at the killed gateway, {load.again} sent again")


def leader_that_serves_is_killed(world):
    """The standby leads after a lease and takes over the engines. No request is lost that the
    standby could serve."""
    return leader_is_killed(world, "serves")


def leader_that_decides_is_killed(world):
    """The other gateway serves without a gap, and completes the change of flags that the killed one
    had begun."""
    return leader_is_killed(world, "decides")


def election_without_api_server(world):
    """Without the API server no gateway leads, but both serve. Afterwards one leads again, and no
    request is lost."""
    world.apply(statefulset("led", 2))
    gateways = several(world, "away", 'selector = "app=led", statefulset = "led"', cluster='leader = "decides"', state="away")
    return ends(lambda: without_api_server(world, gateways), *gateways)


def without_api_server(world, gateways):
    leader_of(gateways)
    names = ["led-0", "led-1"]
    load = Balanced(gateways)
    load.served_by(names, {})
    world.cluster.kill_server()
    try:
        until("none leads", lambda: not any(gateway.leads() for gateway in gateways), LEASE_SECONDS)
        until("the lease is over", lambda: all(gateway.cluster().get("standing") == "keeping" for gateway in gateways), 2 * LEASE_SECONDS)
        load.served_by(names, load.since())
        check(all(gateway.is_ready() for gateway in gateways), "a gateway is not ready")
        why = gateways[0].cluster()["leader"].get("why") or ""
        check("cannot be reached" in why or "has not answered" in why, why)
    finally:
        began = time.monotonic()
        world.cluster.restart_server()
    leader_of(gateways)
    led = time.monotonic() - began
    # The leader keeps leading when its Lease is deleted, even if the other gateway first creates a
    # new one without a holder.
    leader, [other] = leader_of(gateways)
    world.cluster.delete(LEASE)
    holder = lambda: world.cluster.call("GET", LEASE)[1].get("spec", {}).get("holderIdentity", "")
    until("the Lease names it again", lambda: holder().startswith(leader.name), LEASE_SECONDS)
    check(leader.leads() and not other.leads(), "another one leads")
    code, text = world.cluster.kubectl("get", "lease", "-n", NAMESPACE, f"{KEY}-leader")
    check(code == 0 and leader.name in text, text)
    until("both hold shares", lambda: all(gateway.cluster().get("standing") == "holding" for gateway in gateways))
    load.served_by(names, load.since())
    streams, lost = load.stop()
    check(not lost and not load.cut, f"{len(lost)} of {streams} lost, cut {load.cut}: {lost[:3]}")
    return f"{streams} streams, 0 lost; one leads {led:.1f} s after the API server was started"


def cluster_without_permission(world):
    """Neither the ledger nor the election works, and the gateway names the missing permission for
    each.
    """
    account = world.cluster.account("nothing")
    gateway = Gateway(world.folder, "nothing", account, 'selector = "app=led"', '[cluster]\nkubernetes = {}\nleader = "decides"')
    try:
        until("the ledger", lambda: "ConfigMap sluice-ledger: no permission to get configmaps" in gateway.log())
        why = until("the election", lambda: (gateway.cluster().get("leader") or {}).get("why"))
        check(why.startswith("Lease sluice-ledger-leader: no permission to get leases") and "config/kubernetes" in why, why)
        check(not gateway.is_ready() and not gateway.leads(), gateway.cluster())
    finally:
        gateway.stop()
    return why


def ledger_in_a_config_map(world):
    """Engines never run more requests than their limit with two gateways, when one is frozen and
    resumed, after one is killed, and without the API server."""
    world.apply(statefulset("counted", 2, command=("counting.py",)))
    cluster = f'mode = "strict"\nlease = "{SHORT_LEASE_SECONDS}s"'
    gateways = several(world, "ledger", 'selector = "app=counted"', f"slots = {SLOTS}", cluster)
    try:
        return ends(lambda: limits_hold(world, *gateways), *gateways)
    finally:
        world.cluster.delete(f"{SETS}/counted")


def ledger(world):
    """The gateways in the ConfigMap of the ledger."""
    return json.loads(world.cluster.get(LEDGER)["data"]["ledger"])["gateways"]


def limits_hold(world, first, second):
    names, peaks, seen = ["counted-0", "counted-1"], {}, []
    for gateway in (first, second):
        until("pods in use", lambda: all(gateway.states().get(name) == "in_use" for name in names))
    addresses = [world.node.of(name).address for name in names]

    def counts():
        return [json.loads(ask(address, 8000, "GET", "/peak")[1]) for address in addresses]

    def note(what):
        """Records the maximum that ran since the last record."""
        seen.extend(count["peak"] for count in counts())
        peaks[what] = max(seen)
        seen.clear()
        check(peaks[what] <= SLOTS, f"{what}: {peaks[what]} above {SLOTS}")

    def running():
        found = counts()
        seen.extend(count["peak"] for count in found)
        return [count["running"] for count in found]

    def all_in_use(seconds):
        until("all slots are in use", lambda: running() == [SLOTS, SLOTS], seconds, 0.05)

    # Discards the counts of the warm-up.
    counts()
    loads = [Load(gateway, 20, TOKENS) for gateway in (first, second)]
    all_in_use(60)
    until("both gateways serve", lambda: all(sum(load.since().values()) >= 20 for load in loads))
    note("two gateways")

    # The gateway is frozen for longer than the other gateway waits before it takes the share of a
    # silent gateway.
    first.process.process.send_signal(signal.SIGSTOP)
    try:
        until("it is taken for lost", lambda: first.name not in ledger(world) or "#unexplained" in ledger(world), 8 * SHORT_LEASE_SECONDS)
        for _ in range(4 * SHORT_LEASE_SECONDS):
            time.sleep(0.25)
            running()
    finally:
        first.process.process.send_signal(signal.SIGCONT)
    served = [sum(load.since().values()) for load in loads]
    until("both serve again", lambda: all(sum(load.since().values()) >= before + 20 for load, before in zip(loads, served)))
    note("one was stopped and continued")

    began = time.monotonic()
    first.stop(signal.SIGKILL)
    until("the engines notice it", lambda: sum(running()) < 2 * SLOTS, 10, 0.02)
    loads[0].stop()
    try:
        all_in_use(4 * SHORT_LEASE_SECONDS)
    except Failed:
        # While engines are always full, the other gateway cannot see that the killed gateway has no
        # streams any more. A pause without new requests shows it.
        streams, lost = loads[1].stop()
        check(not lost, lost[:3])
        until("the engines are empty", lambda: running() == [0, 0])
        until("nothing is withheld", lambda: not {"#unexplained", "#earlier"} & ledger(world).keys())
        loads[1] = Load(second, 20, TOKENS)
        all_in_use(30)
    back = time.monotonic() - began
    note("one was killed")

    world.cluster.kill_server()
    try:
        until("admission stops", lambda: running() == [0, 0], 30)
        check(second.cluster()["standing"] == "stopped" and not second.is_ready(), second.cluster())
    finally:
        world.cluster.restart_server()
    all_in_use(60)
    note("the API server was killed")
    streams, lost = loads[1].stop()
    check(not lost, f"{len(lost)} of {streams} lost: {lost[:3]}")
    return f"peaks of {SLOTS}: {peaks}; the share of the killed one is in use after {back:.1f} s"
