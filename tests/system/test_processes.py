"""Each case runs in a process of its own: subreaping and killing all descendants concern a whole process."""

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from skyrl_tinker.system import processes
from tests.support.waiting import PATIENCE_S, wait_until

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, time
from skyrl_tinker.system.processes import die_with_parent
print(subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent).pid, flush=True)
time.sleep(600)
"""


def run(script: str, *arguments: str) -> str:
    given = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(given, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid))


def test_orphans_come_back_and_are_killed_and_reaped() -> None:
    output = run("""
        import subprocess, time
        from skyrl_tinker.system import processes
        processes.become_subreaper()
        shell = subprocess.run(["sh", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, text=True)
        orphan = int(shell.stdout)
        assert [each.pid for each in processes.descendants()] == [orphan]
        assert processes.kill_descendants(grace_s=240.0) == []
        assert processes.descendants() == []
        print(orphan)
    """)
    wait_until_gone(int(output))


def test_children_from_before_are_spared_with_theirs() -> None:
    """As those of a shell that ends with `exec skyrl-tinker serve`, whose workers come and go."""
    output = run("""
        import subprocess
        import psutil
        from skyrl_tinker.system import processes
        earlier = subprocess.Popen(
            ["sh", "-c", "read go; sleep 600 >&- & echo $!; wait"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.become_subreaper()
        print("go", file=earlier.stdin, flush=True)
        worker = int(earlier.stdout.readline())
        try:
            own = subprocess.Popen(["sleep", "600"])
            assert [each.pid for each in processes.descendants()] == [own.pid]
            processes.kill_descendants(grace_s=240.0)
            assert own.poll() is not None
            assert earlier.poll() is None
            assert psutil.pid_exists(worker)
        finally:
            earlier.kill()
            own.kill()
            psutil.Process(worker).kill()
        print(worker)
    """)
    wait_until_gone(int(output))


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    output = run(
        """
        import subprocess, sys, time
        from skyrl_tinker.system import processes
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
        child.stdout.readline()
        started = time.monotonic()
        assert processes.kill_descendants(grace_s=0.5) == [child.pid]
        assert 0.5 <= time.monotonic() - started < 20
        print(child.pid)
        """,
        STUBBORN,
    )
    wait_until_gone(int(output))


def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(child)


def test_dead_orphans_are_collected_but_not_the_children_of_others() -> None:
    run("""
        import subprocess, time
        import psutil
        from skyrl_tinker.system import processes
        processes.become_subreaper()
        own = subprocess.Popen(["false"])
        subprocess.run(["sh", "-c", "true &"])
        while not all(each.status() == psutil.STATUS_ZOMBIE for each in processes.descendants()):
            time.sleep(0.01)
        processes.reap_orphans(known=(own.pid,))
        assert [each.pid for each in processes.descendants()] == [own.pid]
        assert own.wait() == 1
    """)


def test_leftovers_are_ended_by_pid_and_start_time(tmp_path: Path) -> None:
    file = tmp_path / "processes.json"
    with subprocess.Popen(["sleep", "600"]) as left, subprocess.Popen(["sleep", "600"]) as stranger:
        mine = processes.identities([psutil.Process(left.pid)])
        reused = processes.Identity(stranger.pid, psutil.Process(stranger.pid).create_time() - 3600)
        processes.write_pid_file(file, {*mine, reused})
        assert processes.end_leftovers(file, grace_s=240.0) == 1
        wait_until_gone(left.pid)
        assert stranger.poll() is None
        stranger.kill()
    assert not file.exists()
    assert processes.end_leftovers(file, grace_s=240.0) == 0


def test_nice_work_leaves_the_niceness_of_its_process() -> None:
    run("""
        import os
        from concurrent.futures import ThreadPoolExecutor
        from skyrl_tinker.system.processes import run_nicely

        def niceness():
            return os.getpriority(os.PRIO_PROCESS, 0)

        def below():
            with ThreadPoolExecutor(1) as thread:
                return niceness(), thread.submit(niceness).result()

        own = niceness()
        assert run_nicely(below, 1) == (own + 1, own + 1)
        assert run_nicely(below, 0) == below() == (own, own)
        try:
            run_nicely(lambda: 1 / 0, 1)
        except ZeroDivisionError:
            print("as it was raised")
    """)


@pytest.mark.skipif(processes.slice_s() == 0, reason="the kernel has one slice for all")
def test_a_slice_is_inherited_by_threads_and_children_and_leaves_the_niceness() -> None:
    run("""
        import os, subprocess
        from concurrent.futures import ThreadPoolExecutor
        from skyrl_tinker.system.processes import compute_in_slices, slice_s

        def own():
            return slice_s(), os.getpriority(os.PRIO_PROCESS, 0)

        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # also where the tests are idle ones
        before, niceness = own()
        os.nice(1)
        assert before < 0.02 and compute_in_slices(0.02)
        os.nice(1)
        assert own() == (0.02, niceness + 2)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(own).result() == own()
        child = subprocess.Popen(["sleep", "600"])
        inherited = slice_s(child.pid)
        child.kill()
        assert inherited == 0.02
    """)


def test_an_end_at_once_waits_for_no_thread_and_loses_no_line_of_the_log() -> None:
    script = """
import logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from logging.handlers import MemoryHandler
from skyrl_tinker.system.processes import end_at_once

buffered = MemoryHandler(1000, target=logging.StreamHandler())
logging.basicConfig(handlers=[buffered])
ThreadPoolExecutor(1).submit(threading.Event().wait)
logging.warning("ended: disk full")
end_at_once(3)
"""
    given = [sys.executable, "-c", script]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (3, "ended: disk full\n")
