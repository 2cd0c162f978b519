# A game joins a Shoal run, over WebSocket: it shows what its agents observe, and receives what they do. For Godot 3.
# Copy this file into the project. docs/games/godot.md says how to use it, docs/protocol.md what it sends.
extends Node

signal joined(spec) # each time that a gateway has answered; the form of observations and actions
signal action(agent, action) # an int, a float, or an Array of them, in C order
signal refused(agent, problem) # its `act` or `end` was not taken, and no action comes: say it again, or begin anew
signal settings_changed(values) # of the run: when the game joins, and when somebody changes them
signal left(reason, finished) # no more actions come. finished: the run is over; otherwise something is wrong

const WELCOME_MS := 2000
const UNKNOWN_MS := 60000 # how long a gateway may be away that has never answered
const AWAY_MS := 300000 # and one that has
const BLOCK_MS := 100 # of one tick; a longer wait stops the tree, so that the window still answers
const SPIN_MS := 1 # of them without naps: most answers come as soon, and a nap makes each 0.1 ms later
const NAP_US := 10 # then the other processes of the machine have the processor
const TERMINATED := 1
const TRUNCATED := 2
const SUCCESS_KNOWN := 4
const SUCCESS := 8
const LARGEST := 3.4028234663852886e38 # of float32, in which the learner computes
const MOVED := ["unknown_episode", "ended_episode", "failed"] # the episode goes on under a new number
const WRITERS := {"float32": "put_float", "float64": "put_double", "bool": "put_u8", "uint8": "put_u8", "int8": "put_8",
		"int16": "put_16", "uint16": "put_u16", "int32": "put_32", "uint32": "put_u32", "int64": "put_64",
		"uint64": "put_u64"}

enum { IDLE, RESTING, OPENING, GREETING, PLAYING }
enum { CLOSED, CONNECTING, OPEN }

var wait := true # the game does not advance while it waits for its actions
var behaviour := "" # who acts, if it is not the run's policy: "human"
var offers := {} # what the game shows and takes, as {"observation": [4], "action": 3}: for a run with `env=ask`. An action
# of numbers and choices is [{"low": -1, "high": 1}, 2]
var certificate := "" # a file with the certificate of a gateway (wss://) that no public authority has signed
var spec := {} # the run's, after `joined`
var run_settings := {} # after `settings_changed`

var _state := IDLE
var _addresses := []
var _address := 0 # the one that is tried
var _hello := {}
var _episodes := {} # the open one of each agent
var _outbox := [] # those with a step that has not been sent
var _pending := {} # by number: those with a step that has no answer
var _answers := [] # episode and action, until the tree runs
var _next_number := 0
var _has_rows := true # the gateway knows `acts`
var _num_numbers := 0 # of an observation
var _all_allowed := [] # a mask, if the run has them
var _is_holding := false # this client has stopped the tree
var _settings_version := 0
var _heartbeat_ms := 1000
var _timeout_ms := 6000
var _attempts := 0 # since the last action
var _retry_at := 0
var _opened_at := 0
var _lost_at := 0 # since when there is no session
var _heard_at := 0
var _sent_at := 0
var _pinged_at := 0


# An agent's episode, with its newest step.
class Episode:
	var agent
	var number := 0
	var step := 0
	var total := 0.0 # of the steps before the newest
	var observation
	var reward = 0.0
	var flags := 0
	var mask
	var taken # in place of the answer before this step
	var played # and of the answer to it
	var is_assisted := false # a person has played
	var is_waiting := false


# Join the run at one of these addresses, ws://HOST:PORT. actor_id: unique among the copies of the game
func join(addresses, token: String, actor_id: String) -> void:
	_addresses = [addresses] if addresses is String else Array(addresses)
	_hello = {"kind": "hello", "protocol": 1, "token": token, "actor_id": actor_id, "incarnation": _clock_ms(),
			"client": "shoal-godot", "inference": "remote"}
	if behaviour:
		_hello["behaviour"] = behaviour
	if offers:
		_hello["offers"] = offers
	_lost_at = _ticks_ms()
	_open()


# The agent's next `act` begins an episode, also when the last one has not ended, and then does not count further.
func begin(agent) -> void:
	_episodes.erase(agent)


# Ask what the agent does, with the reward since the last time. The signal `action` brings the answer, or `refused` what is
# wrong. observation: its numbers, flat, in C order; mask: of each choice whether it is allowed, if the run has masks
func act(agent, observation, reward = 0.0, mask = null) -> void:
	_add_step(agent, observation, reward, 0, mask)


# The agent's episode has ended with this observation. Its next `act` begins another, and need not wait.
# terminated: false if it was cut off, as by a time limit; success: whether it has reached its goal, if it has one
func end(agent, observation, reward = 0.0, terminated := true, success = null) -> void:
	var flags := TERMINATED if terminated else TRUNCATED
	if success != null:
		flags |= SUCCESS_KNOWN | (SUCCESS if success else 0)
	_add_step(agent, observation, reward, flags, null)
	_episodes.erase(agent)


# A person had the controls and played this in place of the newest action. Call it before the next `act` or `end`.
func took(agent, played) -> void:
	_episodes[agent].played = _fill_choices(played.duplicate() if played is Array else played)


# Whether the agent's action has not come yet. With `wait` off, call `act` once this is false.
func is_waiting(agent) -> bool:
	return _episodes.has(agent) and _episodes[agent].is_waiting


# Leave the run. What was said before still arrives, without an answer.
func leave() -> void:
	_say_bye()
	_finish("left", false)


func _say_bye() -> void:
	if _state == PLAYING:
		_send_steps(_take_outbox())
		_send_frames({"kind": "bye"}, [])


func _exit_tree() -> void: # freed, as with its scene: the gateway ends the open episodes at once
	_say_bye()
	_close()


func _add_step(agent, observation, reward, flags: int, mask) -> void:
	if _state == IDLE:
		return # not joined, or the run is over
	var episode = _episodes.get(agent)
	if episode == null:
		if flags:
			_complain(agent, "`end` without an `act` before")
			return
		episode = Episode.new()
		episode.agent = agent
		episode.number = _take_number()
		_episodes[agent] = episode
	elif episode.is_waiting:
		_complain(agent, "`act` or `end` before the action of the last `act`")
		return
	else:
		episode.step += 1
		episode.total += episode.reward
		episode.reward = reward
	episode.observation = observation
	episode.flags = flags
	episode.mask = mask
	episode.taken = episode.played
	episode.is_assisted = episode.is_assisted or episode.played != null
	episode.played = null
	episode.is_waiting = true
	_outbox.append(episode)


func _take_number() -> int:
	_next_number += 1
	return _next_number - 1


# -- the loop ---------------------------------------------------------------------------------------------------------


func _process(_delta) -> void:
	_turn()


func _physics_process(_delta) -> void:
	_turn()


func _turn() -> void:
	if _recorded:
		_replay_steps()
		_deliver()
		return
	if _outbox and _state != IDLE:
		var episodes := _take_outbox()
		if _state == PLAYING:
			_send_steps(episodes)
	_poll()
	var since := _ticks_ms()
	var now := since
	while wait and _pending and not _is_holding and not _is_paused() and now - since < BLOCK_MS:
		if now - since > SPIN_MS:
			OS.delay_usec(NAP_US)
		_poll()
		now = _ticks_ms()
	_hold(wait and _pending.size() > 0)
	_deliver()


# The tree has a script while this client stops it, so that `paused` is what the game says, and not that it waits.
class HeldTree extends SceneTree:
	var is_paused := false

	func _get(property):
		return is_paused if property == "paused" else null

	func _set(property, value):
		if property == "paused":
			is_paused = value
		return property == "paused"


func _hold(is_held: bool) -> void:
	var tree := get_tree()
	if is_held and not _is_holding and not tree.paused:
		_is_holding = true
		tree.paused = true
		if tree.get_script() == null: # not of a game that has its own
			tree.set_script(HeldTree)
	elif _is_holding and not is_held:
		_is_holding = false
		var is_paused := false
		if tree.get_script() == HeldTree:
			is_paused = tree.paused
			tree.set_script(null)
		tree.paused = is_paused


# Whether the game has paused the tree: then no agent acts.
func _is_paused() -> bool:
	return get_tree().paused


# Give the agents their actions; what they do then stands in the outbox.
func _deliver() -> void:
	while _answers and not _is_holding and not _is_paused():
		var answer: Array = _answers.pop_front()
		var episode: Episode = answer[0]
		episode.is_waiting = false
		if answer[1] != null and _episodes.get(episode.agent) == episode:
			emit_signal("action", episode.agent, _cut_choices(answer[1]))


# How many choices each number of an action has, 0 of a number; [] of an action that does not have both.
func _read_choices() -> Array:
	var choices := []
	var form = offers.get("action")
	for part in form if form is Array else []:
		choices.append(0 if part is Dictionary else part)
	return choices if choices.has(0) else []


# A choice among numbers is the whole part of the policy's number, and the middle stands for it.
func _cut_choices(action):
	var choices := _read_choices()
	for i in choices.size():
		if choices[i]:
			action[i] = int(min(choices[i] - 1, action[i]))
	return action


func _fill_choices(played):
	var choices := _read_choices()
	for i in choices.size():
		if choices[i] and played[i] is int:
			played[i] += 0.5
	return played


func _take_outbox() -> Array:
	var episodes := _outbox
	_outbox = []
	for episode in episodes:
		_pending[episode.number] = episode
	return episodes


func _poll() -> void:
	if _state == RESTING and _ticks_ms() >= _retry_at:
		_open()
	if _state < OPENING:
		return
	var connection := _poll_socket()
	var now := _ticks_ms()
	if _state == OPENING and connection == OPEN:
		_state = GREETING
		_send_frames(_hello, [])
	var packet = _receive()
	while packet != null:
		_heard_at = now
		_take_message(_to_buffer(packet))
		packet = _receive() if _state >= OPENING else null
	if _state < OPENING:
		return
	var quiet_ms := now - int(max(_heard_at, _sent_at))
	if connection == CLOSED or _state < PLAYING and now - _opened_at > WELCOME_MS:
		_reconnect()
	elif _pending and _state == PLAYING and quiet_ms > _heartbeat_ms:
		if quiet_ms > _timeout_ms:
			_reconnect()
		elif now - _pinged_at > _heartbeat_ms:
			_pinged_at = now
			_send_frames({"kind": "ping"}, [])


func _open() -> void:
	_state = OPENING
	_opened_at = _ticks_ms()
	_open_socket(_addresses[_address])


# The gateway has gone, or does not come: try the address of the last session first, then each in turn.
func _reconnect() -> void:
	var now := _ticks_ms()
	if _state == PLAYING:
		_lost_at = now
	else:
		_address = (_address + 1) % _addresses.size()
	_close_socket()
	_state = RESTING
	_retry_at = now + (int(min(1000, 25 << _attempts)) if _attempts else 0)
	_attempts = int(min(_attempts + 1, 6))
	if now - _lost_at > (AWAY_MS if _heard_at else UNKNOWN_MS):
		_finish("no gateway has answered at %s" % str(_addresses), false)


func _finish(reason: String, finished: bool) -> void:
	if not finished and reason != "left":
		push_error("shoal: " + reason)
	_close()
	emit_signal("left", reason, finished)


func _close() -> void:
	if _state >= OPENING:
		_close_socket()
	_state = IDLE
	for part in [_episodes, _outbox, _pending, _answers]:
		part.clear()
	_hold(false)


# -- messages ---------------------------------------------------------------------------------------------------------


func _take_message(buffer: StreamPeerBuffer) -> void:
	var message = _from_json(buffer.get_utf8_string(buffer.get_u32()))
	match message.kind:
		"actions":
			_take_actions(message, buffer)
		"action":
			_take_action(message)
		"welcome":
			_take_welcome(message)
		"settings":
			_take_settings(message["values"], message.version)
		"bye":
			if message.get("finished", false):
				_finish(message.get("reason", ""), true)
			else:
				_reconnect()
		"ping":
			_send_frames({"kind": "pong", "nonce": int(message.get("nonce", 0))}, [])
		"error":
			_take_error(message)


func _take_welcome(message) -> void:
	_state = PLAYING
	spec = message.spec
	_heartbeat_ms = int(1000 * message.heartbeat_s)
	_timeout_ms = int(1000 * message.timeout_s)
	_num_numbers = _multiply(spec.observation.shape)
	_all_allowed = []
	for extra in spec.get("extras", []):
		if extra.name == "masks":
			for _choice in int(extra.tensor.shape[0]):
				_all_allowed.append(1)
	for part in ["observation", "action"]:
		if not WRITERS.has(spec[part].dtype):
			_finish("%s: this client has no %s" % [part, spec[part].dtype], false)
			return
	emit_signal("joined", spec)
	if message.has("settings"):
		_take_settings(message.settings, message.get("settings_version", 0))
	if _pending and _state == PLAYING:
		_send_steps(_pending.values())


func _take_settings(values, version) -> void:
	_settings_version = int(version)
	run_settings = values
	emit_signal("settings_changed", values)


func _take_error(message) -> void:
	var text := "%s: %s" % [message.code, message.get("message", "")]
	if message.code == "hello_required":
		_reconnect()
	elif message.code == "unknown_kind" and _has_rows:
		_has_rows = false
		_send_steps(_pending.values())
	elif message.get("fatal", false) or message.code in ["malformed", "too_large"]:
		_finish(text, false)
	else:
		push_warning("shoal: " + text)


func _take_action(message) -> void:
	var episode = _pending.get(int(message.episode))
	if episode == null or episode.step != int(message.step):
		return # an answer that came twice
	if message.get("reason", ""):
		_take_rejection(episode, message.reason, message.get("detail", ""))
	else:
		_answer(episode, _to_action(message.get("action")))


func _take_actions(message, buffer: StreamPeerBuffer) -> void:
	var numbers: Array = message.episodes
	var steps: Array = message.steps
	var shape: Array = spec.action.shape
	var count := _multiply(shape)
	var reader: String = WRITERS[spec.action.dtype].replace("put", "get")
	buffer.get_u32()
	for i in numbers.size():
		var action
		if shape:
			action = []
			for _j in count:
				action.append(buffer.call(reader))
		else:
			action = buffer.call(reader)
		var episode = _pending.get(int(numbers[i]))
		if episode != null and episode.step == int(steps[i]):
			_answer(episode, action)
	for number in message.get("ended", []):
		var episode = _pending.get(int(number))
		if episode != null:
			_answer(episode, null)
	for row in message.get("refused", []):
		var episode = _pending.get(int(row.episode))
		if episode != null and episode.step == int(row.step):
			_take_rejection(episode, row.reason, row.get("detail", ""))


# Numbers of JSON are floats: those of a run with integer actions become integers again.
func _to_action(action):
	if action == null or spec.action.dtype.begins_with("float"):
		return action
	if not action is Array:
		return int(action)
	var numbers := []
	for number in action:
		numbers.append(int(number))
	return numbers


func _answer(episode: Episode, action) -> void:
	_attempts = 0
	_pending.erase(episode.number)
	_answers.append([episode, action])


func _take_rejection(episode: Episode, reason: String, detail: String) -> void:
	_pending.erase(episode.number)
	if not reason in MOVED:
		_refuse(episode, detail if reason == "invalid" else reason + ": " + detail)
	elif _episodes.get(episode.agent) == episode: # not one that has ended: its last steps are lost
		episode.number = _take_number()
		episode.step = 0
		episode.taken = 0 if episode.is_assisted else null # at step 0, any says so
		episode.reward += episode.total
		episode.total = 0.0
		_pending[episode.number] = episode
		_send_steps([episode])


# The episode stays before its newest step, which the game may say again.
func _refuse(episode: Episode, problem: String) -> void:
	_pending.erase(episode.number)
	episode.is_waiting = false
	if episode.step and not _episodes.has(episode.agent):
		_episodes[episode.agent] = episode
	elif episode.step == 0 and _episodes.get(episode.agent) == episode:
		_episodes.erase(episode.agent)
	episode.step -= 1
	episode.reward = 0.0
	episode.played = episode.taken
	_complain(episode.agent, problem)


func _complain(agent, problem: String) -> void:
	push_error("shoal: agent %s: %s" % [str(agent), problem])
	emit_signal("refused", agent, problem)


# What is wrong with the numbers of a step, or "".
func _find_problem(episode: Episode) -> String:
	var of_agent := " of agent " + str(episode.agent)
	var problem := _check_numbers("observation", of_agent, episode.observation, _num_numbers, spec.observation.dtype)
	if not problem:
		problem = _check_numbers("reward", of_agent, episode.reward, 1, "float64")
	if not problem and episode.mask != null and _all_allowed:
		problem = _check_numbers("mask", of_agent, episode.mask, _all_allowed.size(), "bool")
	if not problem and episode.taken != null and episode.step:
		problem = _check_numbers("taken", of_agent, episode.taken, _multiply(spec.action.shape), spec.action.dtype)
	return problem


func _check_numbers(field: String, of_agent: String, values, size: int, dtype: String) -> String:
	var is_list := typeof(values) >= TYPE_ARRAY
	var numbers = values if is_list else [values]
	if numbers.size() != size:
		return "%s%s: %d numbers, expected %d" % [field, of_agent, numbers.size(), size]
	for i in size:
		var problem := _check_number(numbers[i], dtype)
		if problem:
			return field + ("[%d]" % i if is_list else "") + of_agent + ": " + problem
	return ""


func _check_number(number, dtype: String) -> String:
	if not (number is float or number is int or number is bool):
		return "no number"
	var value := float(number)
	if value != value:
		return "NaN"
	if abs(value) > LARGEST:
		return "infinite in float32"
	if dtype[0] == "f":
		return ""
	var bits := 1 if dtype == "bool" else int(dtype.replace("u", "").replace("int", ""))
	var low := 0.0 if dtype[0] in ["b", "u"] else -pow(2, bits - 1)
	var fits: bool = floor(value) == value and value >= low and value < low + pow(2, bits)
	return "" if fits else "%s is no %s" % [number, dtype]


func _send_steps(steps: Array) -> void:
	_sent_at = _ticks_ms()
	var episodes := []
	for episode in steps:
		var problem := _find_problem(episode)
		if problem:
			_refuse(episode, problem)
		else:
			episodes.append(episode)
	if episodes.size() > 1 and _has_rows:
		var rows := []
		for episode in episodes:
			if episode.taken == null:
				rows.append(episode)
			else:
				_send_act(episode)
		_send_rows(rows)
		return
	for episode in episodes:
		_send_act(episode)


func _send_act(episode: Episode) -> void:
	var header := {"kind": "act", "episode": episode.number, "step": episode.step, "reward": episode.reward,
			"terminated": (episode.flags & TERMINATED) > 0, "truncated": (episode.flags & TRUNCATED) > 0}
	if episode.flags & SUCCESS_KNOWN:
		header["success"] = (episode.flags & SUCCESS) > 0
	if episode.taken != null:
		header["taken"] = episode.taken
	if episode.step == 0 and _settings_version:
		header["settings"] = _settings_version
	_send_frames(header, _pack_observations([episode]))


func _send_rows(episodes: Array) -> void:
	var numbers := []
	var steps := []
	var versions := []
	var rewards := StreamPeerBuffer.new()
	var flags := StreamPeerBuffer.new()
	for episode in episodes:
		numbers.append(episode.number)
		steps.append(episode.step)
		versions.append(0 if episode.step else _settings_version)
		rewards.put_float(episode.reward)
		flags.put_u8(episode.flags)
	var header := {"kind": "acts", "episodes": numbers, "steps": steps}
	if _settings_version:
		header["settings"] = versions
	var frames := _pack_observations(episodes)
	frames.insert(1, rewards.data_array)
	frames.insert(2, flags.data_array)
	_send_frames(header, frames)


# The frame of the observations, and in a run with masks that of the masks.
func _pack_observations(episodes: Array) -> Array:
	var observations := []
	var masks := []
	for episode in episodes:
		observations.append(episode.observation)
		masks.append(_all_allowed if episode.mask == null else episode.mask)
	var frames := [_pack(spec.observation.dtype, observations)]
	if _all_allowed:
		frames.append(_pack("bool", masks))
	return frames


func _pack(dtype: String, rows: Array):
	if dtype == "float32":
		return _pack_floats(rows)
	var buffer := StreamPeerBuffer.new()
	for row in rows:
		for number in row:
			buffer.call(WRITERS[dtype], number)
	return buffer.data_array


func _send_frames(header: Dictionary, frames: Array) -> void:
	var buffer := StreamPeerBuffer.new()
	for frame in [_to_bytes(_to_json(header))] + frames:
		buffer.put_u32(frame.size())
		buffer.put_data(frame)
	_send(buffer.data_array)


func _to_buffer(packet) -> StreamPeerBuffer:
	var buffer := StreamPeerBuffer.new()
	buffer.data_array = packet
	return buffer


func _multiply(shape: Array) -> int:
	var product := 1
	for size in shape:
		product *= int(size)
	return product


# -- a recorded episode ------------------------------------------------------------------------------------------------

var diverged_at := -1 # the first step whose observation is not the recorded one

var _recorded := {}


# In place of `join`: one agent plays the actions of a recorded episode, a file of `shoal episodes RUN --export NAME`.
func replay(path: String) -> void:
	var episode = _from_json(_read_text(path))
	if not episode is Dictionary or episode.get("kind") != "episode" or episode.get("format") != 1:
		_finish("%s is no episode of `shoal episodes RUN --export NAME`" % path, false)
		return
	_recorded = episode
	_state = RESTING
	spec = episode.spec
	emit_signal("joined", spec)
	_take_settings(episode.settings, episode.settings_version)


func _replay_steps() -> void:
	for episode in _take_outbox():
		var step: int = episode.step
		if str(_recorded.get("agent", episode.agent)) != str(episode.agent):
			_finish("agent %s: the episode is of one agent, which %s is" % [episode.agent, _recorded.agent], false)
			return
		_recorded.agent = episode.agent
		if diverged_at < 0 and _differs(episode.observation, _recorded.observations, step):
			diverged_at = step
			push_warning("shoal: step %d: the observation is another than the recorded one" % step)
		if episode.flags or step >= _recorded.actions.size():
			_recorded = {}
			_finish("the recorded episode is over", true)
			return
		_answer(episode, _to_action(_recorded.actions[step]))


func _differs(observation, recorded: Array, step: int) -> bool:
	if step >= recorded.size() or observation.size() != recorded[step].size():
		return true
	for i in observation.size():
		if not abs(observation[i] - recorded[step][i]) <= 1e-5 * max(1.0, abs(recorded[step][i])):
			return true
	return false


# -- what this version of Godot has: the other file of the add-on differs from here on ------------------------------

var _socket: WebSocketClient
var _packets := []


func _enter_tree() -> void:
	pause_mode = PAUSE_MODE_PROCESS
	process_priority = 1000 # behind the game: what it asked for in this tick is sent in this tick
	if OS.has_feature("Server"):
		OS.low_processor_usage_mode_sleep_usec = 1 # of each frame without a window: 6900 otherwise


func _open_socket(address: String) -> void:
	_socket = WebSocketClient.new()
	if certificate:
		_socket.trusted_ssl_certificate = X509Certificate.new()
		_socket.trusted_ssl_certificate.load(certificate)
	_socket.set_buffers(1024, 1024, 16384, 1024)
	_packets.clear()
	_socket.connect("data_received", self, "_take_packet")
	if _socket.connect_to_url(address) == OK:
		_socket.get_peer(1).set_write_mode(WebSocketPeer.WRITE_MODE_BINARY)


func _poll_socket() -> int:
	_socket.poll()
	return _socket.get_connection_status()


func _receive():
	return _packets.pop_front()


func _take_packet() -> void: # at once: those before a `close` are gone after it
	_packets.append(_socket.get_peer(1).get_packet())


func _send(bytes: PoolByteArray) -> void:
	_socket.get_peer(1).put_packet(bytes)


func _close_socket() -> void:
	_socket.disconnect_from_host()


func _pack_floats(rows: Array) -> PoolByteArray:
	var numbers := PoolRealArray()
	for row in rows:
		numbers.append_array(PoolRealArray(row))
	return var2bytes(numbers).subarray(8, -1)


func _to_json(value) -> String:
	return to_json(value)


func _from_json(text: String):
	return parse_json(text)


func _to_bytes(text: String) -> PoolByteArray:
	return text.to_utf8()


func _ticks_ms() -> int:
	return OS.get_ticks_msec()


func _clock_ms() -> int:
	return OS.get_system_time_msecs()


func _read_text(path: String) -> String:
	var file := File.new()
	return file.get_as_text() if file.open(path, File.READ) == OK else ""
