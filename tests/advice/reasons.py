"""Why no test takes an advice; and how a page of the documentation is named as the test that does."""

from __future__ import annotations

VALUES = "it names what the argument takes, which every call passes"
OUTSIDE = "the repair is outside: another copy of a file, a later call, more room, the same commit on all nodes"
AS_IT_IS = "it leaves things as they are: the adapter stays one, the argument is left out"
LABEL = "no advice: the name of a step, for the ranks that wait for it"
HELP = "no advice: what an option of the command line does"
OPEN = "no test takes it yet"
REASONS = (VALUES, OUTSIDE, AS_IT_IS, LABEL, HELP, OPEN)

PAGE = "test_docs.py::test_the_examples_of_a_page_run_in_order[{}.md]"  # whose examples take the advice
