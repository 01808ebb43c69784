"""Requests, images and adapter directories that nobody should send, made from a seed; and what becomes of a server.

``values`` holds what is put where it does not belong, ``schemas`` walks a server's OpenAPI description, ``seeds`` are
requests that make sense, ``bodies`` spoils them, ``raw`` writes what is no JSON; ``images`` and ``adapters`` spoil
files; ``calls`` makes request number n of a seed out of all these, ``run`` sends them beside one stream whose tokens
must stay the same, and ``leftovers`` looks at the server afterwards. ``routes`` names what is not called, and why.

``tests/e2e/test_fuzz.py`` sends some hundred to the tests' server, ``python -m tests.soak.fuzzing`` thousands.
"""
