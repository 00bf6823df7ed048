"""The Python side of the bench's protocol: see python.go.

A script calls serve(prepare). prepare gets the configuration and returns what to
call itself and a function that does the work once; it raises Missing for a package
that is not there. Only the function is timed, by the CPU time of the process. It may
return the seconds itself, if a part of it is not to count, or a note.
"""

import json
import sys
import time


class Missing(Exception):
    def __init__(self, package, install):
        super().__init__(package)
        self.package, self.install = package, install


def serve(prepare):
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a package prints must not be taken for an answer

    def answer(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    try:
        name, work = prepare(json.loads(sys.stdin.readline()))
    except Missing as e:
        answer(missing=e.package, install=e.install)
        return
    answer(ready=name)
    for line in sys.stdin:
        if line.strip() != "run":
            raise ValueError(f"unknown request {line!r}")
        began = time.process_time()
        note = work()
        answer(seconds=time.process_time() - began, note=note or "")
