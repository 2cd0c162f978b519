# Times from one action of an agent to its next, in the game. Both sides of the benchmark print them.
extends Reference

const WARM_UP_S := 1.0

var until := 0
var since := 0
var newest := 0
var steps := 0
var periods := []


func begin(seconds: float) -> void:
	until = int(1e6 * seconds)


# Note the actions of a tick; returns whether the time is up, and prints what there was.
func add(num_agents: int) -> bool:
	var now := OS.get_ticks_usec()
	if newest == 0:
		since = now + int(1e6 * WARM_UP_S)
	elif newest > since:
		periods.append(now - newest)
		steps += num_agents
	newest = now
	if until == 0 or now < since + until:
		return false
	periods.sort()
	print(to_json({"p50_ms": periods[periods.size() / 2] / 1e3, "p99_ms": periods[periods.size() * 99 / 100] / 1e3,
			"rate": steps * 1e6 / (now - since)}))
	return true
