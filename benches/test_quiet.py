"""python3 -m unittest discover benches"""
import subprocess
import sys
import unittest
import unittest.mock

import quiet

SPIN = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"


class Quiet(unittest.TestCase):
    def test_counts_are_read_in_seconds(self):
        stat = "cpu  100 50 50 9000 10 0 0 300 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
        hertz = quiet.os.sysconf("SC_CLK_TCK")
        self.assertEqual(quiet.busy_and_stolen(stat), (200 / hertz, 300 / hertz))

    def test_others_and_steal_are_named(self):
        self.assertIsNone(quiet.disturbance(0.02, 0.01, 1))
        self.assertIn("other programs took 50%", quiet.disturbance(0.5, 0, 1))
        self.assertIn("the host took 10%", quiet.disturbance(0, 0.1, 1))

    def test_own_children_are_no_disturbance(self):
        watch = quiet.Watch()
        subprocess.run([sys.executable, "-c", SPIN], check=True)
        alone = watch._now()
        busy, own = alone[0] - watch.before[0], alone[2] - watch.before[2]
        self.assertGreater(own, 0.1)
        self.assertGreaterEqual(busy, 0.8 * own)

    def test_a_program_beside_is_seen(self):
        other = subprocess.Popen([sys.executable, "-c", SPIN])
        watch = quiet.Watch()
        quiet.time.sleep(1)
        found = watch.disturbance()
        other.wait()
        self.assertIn("other programs took", found)

    def test_disturbed_rounds_are_repeated_then_refused(self):
        calls = []
        with unittest.mock.patch.object(quiet.Watch, "disturbance", lambda self: "noise" if len(calls) < 2 else None):
            quiet.undisturbed(lambda: calls.append(1), False)
        self.assertEqual(len(calls), 2)
        with unittest.mock.patch.object(quiet.Watch, "disturbance", lambda self: "noise"):
            with self.assertRaises(SystemExit) as refused:
                quiet.undisturbed(lambda: None, False)
            self.assertIn("noise", str(refused.exception))
            self.assertEqual(quiet.undisturbed(lambda: 5, True), 5)


if __name__ == "__main__":
    unittest.main()
