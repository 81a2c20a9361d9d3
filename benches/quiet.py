"""Checks that the machine is quiet enough for a comparison: use of cores, time stolen by the host, spread of rounds."""
import os
import resource
import sys
import time

# Shares of core time that others may use while a side runs: programs of this machine, and its host
# (steal).
OTHERS, STEAL = 0.03, 0.02
# Maximum ratio of the speeds of a side's rounds.
SPREAD = 1.25
# Maximum repeats of a disturbed round.
ATTEMPTS = 3


def busy_and_stolen(stat):
    """Seconds of work on all cores, and seconds that the host took from them, by the text of /proc/stat."""
    fields = [int(field) for field in stat.split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    hertz = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


class Watch:
    """Watches the machine from construction until `disturbance`. Without /proc/stat it sees nothing."""

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
        """Describes the disturbance since construction, or returns None. Children must have been waited for."""
        now = self._now()
        if now is None or self.before is None:
            return None
        all_secs = (time.monotonic() - self.start) * os.cpu_count()
        busy, stolen, own = (after - before for before, after in zip(self.before, now))
        return disturbance(busy - own, stolen, all_secs)


def disturbance(others_secs, stolen_secs, all_secs):
    """Describes the disturbance within `all_secs` of core time, or returns None."""
    others, stolen = others_secs / all_secs, stolen_secs / all_secs
    if others > OTHERS:
        return f"other programs took {others:.0%} of the cores ({OTHERS:.0%} is allowed)"
    if stolen > STEAL:
        return f"the host took {stolen:.0%} of the cores away ({STEAL:.0%} is allowed)"
    return None


def spread(speeds):
    """The highest speed divided by the lowest."""
    return max(speeds) / min(speeds)


def await_quiet(allow_busy, secs=2.0):
    """Watches the machine for a while. Ends the program if it is not idle, unless a busy machine is allowed."""
    watch = Watch()
    time.sleep(secs)
    found = watch.disturbance()
    if found and not allow_busy:
        sys.exit(f"the machine is busy: {found}; nothing else may run during a comparison (--allow-busy measures all the same)")
    return found


def undisturbed(measure, allow_busy):
    """Returns the result of `measure` from an undisturbed run, repeating disturbed ones. Ends the program if every run is
    disturbed, unless that is allowed."""
    for attempt in range(ATTEMPTS):
        watch = Watch()
        result = measure()
        found = watch.disturbance()
        if not found or allow_busy:
            return result
        print(f"measured again: {found}", file=sys.stderr, flush=True)
    sys.exit(f"the machine is busy: {ATTEMPTS} times {found}; nothing is compared (--allow-busy measures all the same)")
