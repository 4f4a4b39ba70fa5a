# Reads what `cargo test --no-fail-fast` printed; prints for each program with failed tests a line of fields that tabs
# separate: the arguments that choose the program, and the names of the tests. A program that ended in any other way
# than by failed tests (it crashed, was killed, did not build) has no names.
/^ +(Running|Doc-tests) / { count = 0 }
# libtest prints what the failed tests said under the first such line, and their names alone under the second.
/^failures:$/ { listed = 1; count = 0; next }
/^test result: / { listed = 0 }
listed && /^    [^ ]/ { names[++count] = substr($0, 5) }
/^error: (doc)?test failed, to rerun pass `.*`$/ {
	arguments = $0
	sub(/^[^`]*`/, "", arguments)
	sub(/`$/, "", arguments)
	# Without the others, cargo would choose other features of the dependencies, and build them all anew.
	sub(/-p [^ ]+ /, "", arguments)
	line = arguments
	for (i = 1; i <= count; i++) line = line "\t" names[i]
	print line
	count = 0
}
