"""The cache of tables beside forks, signals and destructors."""

import threading

from rotary.cache import Cache


def test_what_is_evicted_dies_after_the_lock():
    """A dying table gives its memory back under another lock, which a fork takes in its turn."""
    cache = Cache(100)
    held = []

    class Table:
        nbytes = 80

        def __del__(self):
            def look():
                held.append(cache.lock.acquire(timeout=0))
                if held[-1]:
                    cache.lock.release()

            seen = threading.Thread(target=look)
            seen.start()
            seen.join()

    for key in "ab":
        cache.get(key, Table)
    assert held == [True]


def test_a_signal_in_the_middle_of_the_cache_is_answered():
    cache, answers = Cache(100), []

    class Key:
        """Asks the cache while the cache looks for it, as a signal handler may."""

        def __hash__(self):
            answers.append(cache.get("other", lambda: 7))
            return 1

    thread = threading.Thread(target=cache.get, args=(Key(), lambda: 5), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert set(answers) == {7}
