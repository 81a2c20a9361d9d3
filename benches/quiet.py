"""Whether the machine is quiet enough for a comparison: who uses its cores, what the host takes away, how rounds differ."""
import os
import resource
import sys
import time

# Shares of the cores' time that others may take while a side runs: programs of this machine, and its host (steal).
OTHERS, STEAL = 0.03, 0.02
# The greatest speed of a side's rounds over the least.
SPREAD = 1.25
# How often a round is repeated that others disturbed.
ATTEMPTS = 3


def busy_and_stolen(stat):
    """Seconds that all cores worked, and that the host took from them, by the text of /proc/stat."""
    fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    hertz = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


class Watch:
    """Watches the machine from its making until `disturbance`. Without /proc/stat it sees nothing."""

    def __init__(self):
        self.start = time.monotonic()
        self.before = self._now()

    @staticmethod
    def _now():
        try:
            with open("/proc/stat") as file:
                busy, stolen = busy_and_stolen(file.read())
        except OSError:
            return None
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy, stolen, sum(u.ru_utime + u.ru_stime for u in used)

    def disturbance(self):
        """What disturbed the time since, in words, or None. Children must have been waited for."""
        now = self._now()
        if now is None or self.before is None:
            return None
        all_secs = (time.monotonic() - self.start) * os.cpu_count()
        busy, stolen, own = (after - before for before, after in zip(self.before, now))
        return disturbance(busy - own, stolen, all_secs)


def disturbance(others_secs, stolen_secs, all_secs):
    """What disturbed `all_secs` of core time, in words, or None."""
    others, stolen = others_secs / all_secs, stolen_secs / all_secs
    if others > OTHERS:
        return f"other programs took {others:.0%} of the cores ({OTHERS:.0%} is allowed)"
    if stolen > STEAL:
        return f"the host took {stolen:.0%} of the cores away ({STEAL:.0%} is allowed)"
    return None


def spread(speeds):
    """The greatest speed over the least."""
    return max(speeds) / min(speeds)


def await_quiet(allow_busy, secs=2.0):
    """Looks at the idle machine for a while. Ends the program if it is not idle, unless that is allowed."""
    watch = Watch()
    time.sleep(secs)
    found = watch.disturbance()
    if found and not allow_busy:
        sys.exit(f"the machine is busy: {found}; nothing else may run during a comparison (--allow-busy measures all the same)")
    return found


def undisturbed(measure, allow_busy):
    """What `measure` returns, in a time in which nothing else ran: it is called again if something did. Ends the program if
    something always did, unless that is allowed."""
    for attempt in range(ATTEMPTS):
        watch = Watch()
        result = measure()
        found = watch.disturbance()
        if not found or allow_busy:
            return result
        print(f"measured again: {found}", file=sys.stderr, flush=True)
    sys.exit(f"the machine is busy: {ATTEMPTS} times {found}; nothing is compared (--allow-busy measures all the same)")
