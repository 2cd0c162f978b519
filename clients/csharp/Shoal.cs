// A game in C# joins a run of Shoal: the run's policy acts in it, and learns from its rewards. One file, for .NET
// Standard 2.1, .NET Framework 4.7 and Mono, no package. docs/games/csharp.md is its page.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Net.WebSockets;
using System.Text;
using System.Text.RegularExpressions;
using System.Threading;
using System.Threading.Tasks;
using Map = System.Collections.Generic.Dictionary<string, object>;

namespace Shoal {

/// <summary>Code is one of docs/protocol.md (`bad_token`, `invalid`, ...), or of this client: `unreachable`, `rejected`
/// (by HTTP), `malformed` (bytes that are no answer), `timeout`, `busy`.</summary>
public sealed class ShoalException : Exception {
  public readonly string Code;
  public readonly int Agent;  // that it is about; -1: none
  public ShoalException(string code, string problem, int agent = -1) : base(code + ": " + problem) {
    Code = code; Agent = agent;
  }
}

/// <summary>The answer to an observation. A Discrete action is an int.</summary>
public sealed class AgentAction {
  public double[] Values = { 0 };  // in C order
  public long Version;             // of the weights that chose it
  public static implicit operator int(AgentAction action) => (int)action.Values[0];
}

/// <summary>How an episode ended.</summary>
public enum End { Terminated = 1, Truncated = 2 }

public sealed class Options {
  public double WaitSeconds = 300;    // the longest that Act and Wait take
  public double GiveUpSeconds;        // without a gateway; 0: 60 before the first session, 300 after one
  public string Behaviour = "";       // who acts, as "human"; empty: the run's policy
  public string Offers = "";          // the spaces of this game as JSON: {"observation": [4], "action": 3}; an action of
                                      // numbers and choices is [{"low": -1, "high": 1}, 2]
  public string Replay = "";  // in place of a run: a file of `shoal episodes RUN --export NAME`, for one agent
  public Action<Map> OnSettings;  // called by Poll and Act, with the welcome and on change
}

/// <summary>A game's part in a run. Its agents have numbers of the game's choice. Connects within Poll, Wait and Act,
/// again whenever that is needed: then what is unanswered is sent again. One thread at a time uses it.</summary>
public sealed class Run : IDisposable {
  enum Phase { Away, Joining, Joined, Over }
  const int MaxRows = 1024;  // of a message
  static readonly string[] Final = { "malformed", "too_large" };  // no answer follows
  static readonly string[] Lost = { "unknown_episode", "ended_episode", "failed" };

  sealed class Agent {
    public int Number;
    public Episode Episode;  // null: none is open
    public Array Taken;      // before its next step
    public AgentAction Action = new AgentAction();
  }

  sealed class Episode {
    public Agent Agent;
    public long Number, Step;
    public long Settings;  // the version that it began with
    public double Total;   // the return, with Reward
    public float Reward;
    public int Flags;      // 1 terminated, 2 truncated, 4 success is known, 8 success
    public bool Waits, IsSent, IsAssisted;  // a person has acted in it
    public Array Observation, Mask, Taken;
    public bool IsEnding => (Flags & 3) != 0;
  }

  readonly string[] addresses;
  readonly string token, actorId;
  readonly Options options;
  readonly long incarnation = (DateTime.UtcNow - new DateTime(1970, 1, 1)).Ticks / TimeSpan.TicksPerMillisecond;
  readonly Stopwatch clock = Stopwatch.StartNew();
  readonly Dictionary<int, Agent> agents = new Dictionary<int, Agent>();
  /// The open ones, and those with an end that is unanswered, by number.
  readonly SortedDictionary<long, Episode> episodes = new SortedDictionary<long, Episode>();
  readonly Queue<ShoalException> errors = new Queue<ShoalException>();
  readonly double[] choices = new double[0];  // of each number of an action that has both numbers (0) and choices
  ShoalException fatal;
  Connection connection;
  Phase phase = Phase.Away;
  TensorForm observationForm = new TensorForm(), actionForm = new TensorForm();
  string runId = "", why = "";
  int address, attempts, numWaiting, numChoices;
  bool hasGreeted, hasRows = true, wasAnswered;
  long nextEpisode, settingsVersion;
  double steppedAt = -1, since, tryAt, deadline, heardAt, askedAt, pingedAt, heartbeatSeconds = 1, timeoutSeconds = 6;

  /// <summary>The newest settings of the run, and the gateway's welcome, as JSON is read.</summary>
  public Map Settings { get; private set; } = new Map();
  public Map Welcome { get; private set; } = new Map();
  /// <summary>Whether the run has ended, this game has left it, or an error was fatal.</summary>
  public bool IsOver => phase == Phase.Over;
  public bool IsConnected => phase == Phase.Joined;
  /// <summary>The first step of a replay whose observation is not the recorded one; -1: none.</summary>
  public long DivergedAt { get; private set; } = -1;

  public Run(string address, string token, string actorId, Options options = null)
      : this(new[] { address }, token, actorId, options) { }

  public Run(string[] addresses, string token, string actorId, Options options = null) {
    this.addresses = addresses; this.token = token; this.actorId = actorId; this.options = options ?? new Options();
    var form = (Json.Parse(this.options.Offers) as Map ?? new Map()).List("action");
    if (form.Any(each => each is Map)) choices = form.Select(Json.ToNumber).ToArray();
  }

  /// <summary>Wait for the welcome, at most WaitSeconds: where the first episode needs the settings.</summary>
  public void Connect() => WaitUntil(() => IsConnected);

  /// <summary>The next action of an agent; its first observation begins an episode. `reward` is that of the action
  /// before. Waits for the answer, at most WaitSeconds. When the run ends meanwhile, IsOver is true.</summary>
  public AgentAction Act(int agent, Array observation, float reward = 0, Array mask = null) {
    Ask(agent, observation, reward, mask);
    WaitUntil(() => !IsWaiting(agent));
    return ActionOf(agent);
  }

  /// <summary>The same without waiting: Poll sends it, with other agents'. Afterwards the agent waits.</summary>
  public void Ask(int agent, Array observation, float reward = 0, Array mask = null) {
    Put(agent, observation, reward, 0, mask);
  }

  /// <summary>End an agent's episode with its last observation. It is sent as by Ask, and the agent may ask at once for
  /// another.</summary>
  public void End(int agent, Array observation, float reward = 0, End how = Shoal.End.Terminated, bool? success = null,
                  Array mask = null) {
    Put(agent, observation, reward, (int)how | (success == null ? 0 : success.Value ? 12 : 4), mask);
  }

  /// <summary>The action that a person took in place of the newest answer, before the next Ask or End.</summary>
  public void TakeOver(int agent, Array taken) =>
      Find(agent).Taken = choices.Length != taken.Length ? taken
          : taken.Cast<object>().Select((each, i) => Convert.ToDouble(each) + (choices[i] > 0 ? 0.5 : 0)).ToArray();

  /// A choice among numbers is the whole part of the policy's number.
  double[] Cut(double[] values) =>
      choices.Length != values.Length ? values
          : values.Select((each, i) => choices[i] > 0 ? Math.Min(choices[i] - 1, Math.Floor(each)) : each).ToArray();

  /// <summary>Send what was asked, receive, reconnect; never waits. True when nothing is unanswered.</summary>
  public bool Poll() { Step(); Check(); return numWaiting == 0; }

  /// <summary>Wait until everything is answered, also ends, at most WaitSeconds.</summary>
  public void Wait() => WaitUntil(() => numWaiting == 0);

  /// <summary>Whether the agent's action has not come yet.</summary>
  public bool IsWaiting(int agent) => Find(agent).Episode?.Waits == true;
  /// <summary>The newest answer.</summary>
  public AgentAction ActionOf(int agent) => Find(agent).Action;

  /// <summary>Send the ends of episodes, within a second, and say goodbye. Open episodes are not counted.</summary>
  public void Dispose() {
    double last = Now + 1;
    Func<bool> areEnding = () => episodes.Values.Any(each => each.Waits && each.IsEnding);
    for (; !IsOver && areEnding() && Now < last; Step()) connection?.Wait(20);
    if (IsConnected && options.Replay == "") Send("{\"kind\":\"bye\"}");
    connection?.Close();
    Finish();
  }

  double Now => clock.Elapsed.TotalSeconds;

  Agent Find(int number) {
    if (!agents.TryGetValue(number, out Agent agent)) agents[number] = agent = new Agent { Number = number };
    return agent;
  }

  void Put(int number, Array observation, float reward, int flags, Array mask) {
    Agent agent = Find(number);
    Episode episode = agent.Episode;
    if (IsOver) { Check(); return; }
    if (episode != null && episode.Waits) throw new ShoalException("busy", "the agent waits for an answer", number);
    string problem = FindProblem("observation", number, observation) ?? FindProblem("reward", number, new[] { reward })
        ?? (episode == null || agent.Taken == null ? null : FindProblem("taken", number, agent.Taken));
    if (problem != null) throw new ShoalException("invalid", problem, number);
    if (episode == null && flags != 0) throw new ShoalException("invalid", "the agent has no episode to end", number);
    if (episode == null) {
      episode = agent.Episode = new Episode { Agent = agent, Number = nextEpisode++, Settings = settingsVersion };
      episodes[episode.Number] = episode;
    } else {
      episode.Step++; episode.Reward = reward; episode.Total += reward;
      episode.Taken = agent.Taken; episode.IsAssisted |= agent.Taken != null;
    }
    episode.Observation = (Array)observation.Clone(); episode.Mask = (Array)mask?.Clone();
    episode.Flags = flags; episode.Waits = true; episode.IsSent = false;
    agent.Taken = null; numWaiting++;
    if (episode.IsEnding) agent.Episode = null;
  }

  static string Describe(string field, int agent, string problem) => field + " of agent " + agent + ": " + problem;

  /// What is wrong with the first number that is none, or not finite in float32, in which the learner computes; or null.
  static string FindProblem(string field, int agent, Array values) {
    Type type = values.GetType().GetElementType();
    if (type.IsPrimitive && type != typeof(float) && type != typeof(double)) return null;
    int at = -1;
    foreach (object each in values) {
      at++;
      bool isNumber = each != null && (each.GetType().IsPrimitive || each is decimal);
      double number = isNumber ? Convert.ToDouble(each) : 0;
      if (isNumber && Math.Abs(number) <= float.MaxValue) continue;
      string problem = !isNumber ? "no number" : double.IsNaN(number) ? "NaN" : "infinite in float32";
      return Describe(field == "reward" ? field : field + "[" + at + "]", agent, problem);
    }
    return null;
  }

  /// Go on with an episode that the gateway has not, under another number.
  void Renew(Episode episode) {
    episodes.Remove(episode.Number);
    episode.Number = nextEpisode++; episode.Step = 0; episode.Reward = (float)episode.Total; episode.IsSent = false;
    episode.Taken = episode.IsAssisted ? new double[actionForm.Count] : null;
    episodes[episode.Number] = episode;
  }

  void Release(Episode episode, bool isOpen) {
    if (episode.Waits) numWaiting--;
    episode.Waits = false; episode.Taken = null;
    if (isOpen) return;
    episodes.Remove(episode.Number);
    if (episode.Agent.Episode == episode) episode.Agent.Episode = null;
  }

  void Refuse(Episode episode, string reason, string detail) {
    bool isLost = Lost.Contains(reason);
    Agent agent = episode.Agent;
    if (isLost && !episode.IsEnding) { Renew(episode); return; }
    if (!isLost) errors.Enqueue(new ShoalException(reason, detail, agent.Number));
    bool isOpen = reason == "invalid" && episode.Step > 0 && (agent.Episode ?? episode) == episode;
    if (isOpen) { episode.Step--; episode.Total -= episode.Reward; agent.Episode = episode; }  // it may be asked again
    Release(episode, isOpen);
  }

  void WaitUntil(Func<bool> isDone) {
    double last = Now + options.WaitSeconds;
    for (Step(); !IsOver && errors.Count == 0 && !isDone(); Step()) {
      if (Now >= last) errors.Enqueue(new ShoalException("timeout", "no answer for " + options.WaitSeconds + " s"));
      else if (connection == null) Thread.Sleep(5);
      else connection.Wait((int)(1000 * Math.Min(last - Now, 0.02)) + 1);
    }
    Check();
  }

  void Check() {
    if (errors.Count > 0) throw errors.Dequeue();
    if (fatal != null) throw fatal;
  }

  void Finish(ShoalException error = null) {
    fatal = fatal ?? error; phase = Phase.Over; numWaiting = 0; connection?.Abort();
    foreach (Agent agent in agents.Values) {
      agent.Episode = null;
      agent.Action = new AgentAction { Values = new double[actionForm.Count] };
    }
  }

  void Step() {
    if (IsOver) return;
    if (options.Replay != "") { Replay(); return; }
    double time = Now, pause = Math.Max(0, time - steppedAt - 1);  // the game did not poll for so long
    if (steppedAt < 0) { pause = 0; since = time; }
    steppedAt = time; since += pause; heardAt += pause;
    if (phase == Phase.Away) {
      double limit = options.GiveUpSeconds > 0 ? options.GiveUpSeconds : wasAnswered ? 300 : 60;
      if (time - since > limit) Finish(new ShoalException("unreachable", "no gateway for " + limit + " s: " + why));
      if (IsOver || time < tryAt) return;
      phase = Phase.Joining; hasGreeted = false; deadline = time + 2;
      connection = new Connection(addresses[address]);
    }
    for (byte[] message; (message = connection.Receive()) != null;) {
      heardAt = time; Take(message);
      if (phase == Phase.Away || IsOver) return;
    }
    if (connection.Lost != null) { Lose(connection.Lost); return; }
    if (phase == Phase.Joining && connection.IsOpen && !hasGreeted) { Greet(); deadline = time + 2; }
    if (phase == Phase.Joining && time > deadline) { Lose(new ShoalException("", "no welcome within 2 s")); return; }
    if (phase != Phase.Joined) return;
    Flush(time);
    double silence = numWaiting > 0 ? time - Math.Max(heardAt, askedAt) : 0;
    if (silence > timeoutSeconds) Lose(new ShoalException("", "silent for " + timeoutSeconds + " s"));
    else if (silence > heartbeatSeconds && time - pingedAt > heartbeatSeconds) {
      pingedAt = time;
      Send("{\"kind\":\"ping\"}");
    }
  }

  /// Connect again: to the same address after a session, then to the next ones.
  void Lose(ShoalException error) {
    if (error.Code != "" && addresses.Length == 1) { Finish(error); return; }
    connection.Abort();
    why = addresses[address] + error.Message;
    if (phase == Phase.Joined) since = Now; else address = (address + 1) % addresses.Length;
    tryAt = Now + (attempts == 0 ? 0 : Math.Min(1, 0.05 * Math.Pow(2, attempts - 1)));
    attempts = Math.Min(attempts + 1, 9); phase = Phase.Away;
  }

  void Greet() {
    hasGreeted = true;
    string hello = "{\"kind\":\"hello\",\"protocol\":1,\"inference\":\"remote\",\"client\":\"c#\"";
    hello += ",\"incarnation\":" + incarnation;
    hello += ",\"token\":" + Json.Quote(token) + ",\"actor_id\":" + Json.Quote(actorId);
    if (runId != "") hello += ",\"run_id\":" + Json.Quote(runId);
    if (options.Offers != "") hello += ",\"offers\":" + options.Offers;
    if (options.Behaviour != "") hello += ",\"behaviour\":" + Json.Quote(options.Behaviour);
    Send(hello + "}");
  }

  void Send(string header, params byte[][] frames) {
    var message = new MemoryStream();
    foreach (byte[] frame in new[] { Encoding.UTF8.GetBytes(header) }.Concat(frames)) {
      message.Write(BitConverter.GetBytes(frame.Length), 0, 4);
      message.Write(frame, 0, frame.Length);
    }
    connection.Send(message.ToArray());
  }

  /// Send what is unsent: one agent's as `act`, those of several as rows of `acts`.
  void Flush(double time) {
    var unsent = episodes.Values.Where(each => each.Waits && !each.IsSent).ToList();
    if (unsent.Count == 0) return;
    askedAt = time;
    var rows = new List<Episode>();
    var frames = new[] { new MemoryStream(), new MemoryStream(), new MemoryStream(), new MemoryStream() };
    foreach (Episode episode in unsent) {
      string problem = Pack(episode, out byte[] observation, out byte[] mask);
      if (problem != null) { Refuse(episode, "invalid", problem); continue; }
      episode.IsSent = true;
      if (!hasRows || unsent.Count == 1 || episode.Taken != null) {
        if (mask == null) Send(Describe(episode), observation); else Send(Describe(episode), observation, mask);
        continue;
      }
      rows.Add(episode);
      frames[0].Write(observation, 0, observation.Length);
      frames[1].Write(BitConverter.GetBytes(episode.Reward), 0, 4);
      frames[2].WriteByte((byte)episode.Flags);
      if (mask != null) frames[3].Write(mask, 0, mask.Length);
      if (rows.Count == MaxRows) SendRows(rows, frames);
    }
    if (rows.Count > 0) SendRows(rows, frames);
  }

  void SendRows(List<Episode> rows, MemoryStream[] frames) {
    string numbers = string.Join(",", rows.Select(each => each.Number));
    string steps = string.Join(",", rows.Select(each => each.Step));
    string settings = string.Join(",", rows.Select(each => each.Step == 0 ? each.Settings : 0));
    if (settingsVersion > 0) steps += "],\"settings\":[" + settings;
    Send("{\"kind\":\"acts\",\"episodes\":[" + numbers + "],\"steps\":[" + steps + "]}",
         frames.Take(numChoices > 0 ? 4 : 3).Select(each => each.ToArray()).ToArray());
    rows.Clear();
    foreach (MemoryStream each in frames) each.SetLength(0);
  }

  /// The frames of an observation and its mask. Returns what is wrong with them, or null.
  string Pack(Episode episode, out byte[] observation, out byte[] mask) {
    mask = null;
    int agent = episode.Agent.Number;
    string problem = observationForm.Pack(episode.Observation, out observation);
    if (problem != null) return Describe("observation" + observationForm.Index, agent, problem);
    if (numChoices == 0) return null;
    if (episode.Mask == null && (episode.Flags & 1) != 0) mask = Enumerable.Repeat((byte)1, numChoices).ToArray();
    if (mask != null) return null;
    var form = new TensorForm { Count = numChoices, Dtype = "bool" };
    problem = form.Pack(episode.Mask ?? new bool[0], out mask);
    return problem == null ? null : Describe("mask" + form.Index, agent, problem);
  }

  string Describe(Episode episode) {
    var header = new StringBuilder("{\"kind\":\"act\",\"episode\":" + episode.Number + ",\"step\":" + episode.Step);
    header.Append(",\"reward\":" + Json.Format(episode.Reward));
    if (episode.IsEnding) header.Append((episode.Flags & 1) != 0 ? ",\"terminated\":true" : ",\"truncated\":true");
    if ((episode.Flags & 4) != 0) header.Append((episode.Flags & 8) != 0 ? ",\"success\":true" : ",\"success\":false");
    if (episode.Step == 0 && episode.Settings > 0) header.Append(",\"settings\":" + episode.Settings);
    if (episode.Taken != null) {
      string taken = string.Join(",", episode.Taken.Cast<object>().Select(each => Json.Format(Convert.ToDouble(each))));
      header.Append(",\"taken\":" + (actionForm.IsScalar ? taken : "[" + taken + "]"));
    }
    return header.Append('}').ToString();
  }

  void Take(byte[] message) {
    var frames = new List<ArraySegment<byte>>();
    Map header = null;
    for (int at = 0, size; at < message.Length; at += size) {
      size = at + 4 > message.Length ? -1 : BitConverter.ToInt32(message, at);
      at += 4;
      if (size < 0 || size > message.Length - at) { Reject("a frame that ends beyond its message"); return; }
      frames.Add(new ArraySegment<byte>(message, at, size));
    }
    if (frames.Count > 0) header = Json.Parse(Encoding.UTF8.GetString(message, 4, frames[0].Count)) as Map;
    if (header == null) { Reject("a header that is no JSON"); return; }
    string kind = header.Text("kind"), code = header.Text("code"), text = header.Text("message");
    wasAnswered |= kind == "welcome" || kind == "bye";
    if (kind == "welcome") Join(header);
    else if (kind == "bye" && header.Number("finished") != 0) Finish();
    else if (kind == "bye") Lose(new ShoalException("", header.Text("reason")));
    else if (kind == "error" && code == "hello_required") Lose(new ShoalException("", text));
    else if (kind == "error" && code == "unknown_kind" && IsConnected) { hasRows = false; Resend(); }
    else if (kind == "error" && (header.Number("fatal") != 0 || !IsConnected || Final.Contains(code)))
      Finish(new ShoalException(code, text));
    else if (!IsConnected) return;
    else if (kind == "action") TakeAction(header);
    else if (kind == "actions") TakeActions(header, frames);
    else if (kind == "settings") Apply(header.Integer("version"), header.Map("values"));
    else if (kind == "ping") Send("{\"kind\":\"pong\",\"nonce\":" + Json.Format(header.Number("nonce")) + "}");
  }

  void Reject(string what) => Finish(new ShoalException("malformed", "the gateway sent " + what));

  void Resend() { foreach (Episode each in episodes.Values) each.IsSent = false; }

  void Join(Map header) {
    Welcome = header;
    var spec = header.Map("spec");
    if (header.Text("inference") != "remote")
      Finish(new ShoalException("no_remote_inference", "this gateway cannot infer"));
    else if (!observationForm.Read(spec.Map("observation"))) Reject("a spec of observations: " + observationForm.Dtype);
    else if (!actionForm.Read(spec.Map("action"))) Reject("a spec of actions: " + actionForm.Dtype);
    if (IsOver) return;
    numChoices = 0;
    foreach (var extra in spec.List("extras").OfType<Map>()) {
      var mask = new TensorForm();
      if (extra.Text("name") == "masks" && mask.Read(extra.Map("tensor"))) numChoices = mask.Count;
    }
    if (runId != "" && runId != header.Text("run_id")) {  // another run: it knows none of the episodes
      settingsVersion = 0;
      foreach (Episode each in episodes.Values.ToList()) { each.Total = 0; if (each.Waits) Refuse(each, Lost[0], ""); }
    }
    runId = header.Text("run_id"); heartbeatSeconds = Math.Max(0.1, header.Number("heartbeat_s"));
    timeoutSeconds = Math.Max(heartbeatSeconds, header.Number("timeout_s"));
    phase = Phase.Joined; hasRows = true; Resend();
    if (header.Number("settings_version") > 0) Apply(header.Integer("settings_version"), header.Map("settings"));
  }

  void Apply(long version, Map values) {
    if (version == settingsVersion) return;
    settingsVersion = version; Settings = values;
    options.OnSettings?.Invoke(values);
  }

  /// The episode that waits for the answer to this step, or null: it came twice.
  Episode FindWaiting(object number, object step) {
    episodes.TryGetValue(Json.ToInteger(number), out Episode episode);
    return episode != null && episode.Waits && episode.Step == Json.ToInteger(step) ? episode : null;
  }

  void TakeAction(Map header) {
    Episode episode = FindWaiting(header.Get("episode"), header.Get("step"));
    attempts = 0;
    if (episode == null) return;
    if (header.Text("reason") != "") { Refuse(episode, header.Text("reason"), header.Text("detail")); return; }
    if (episode.IsEnding) { Release(episode, false); return; }
    var items = header.Get("action") is double ? new List<object> { header.Get("action") } : header.List("action");
    double[] values = items.Select(Json.ToNumber).ToArray();
    if (values.Length != actionForm.Count) { Reject("an action of " + values.Length + " numbers"); return; }
    episode.Agent.Action = new AgentAction { Values = Cut(values), Version = header.Integer("version") };
    Release(episode, true);
  }

  void TakeActions(Map header, List<ArraySegment<byte>> frames) {
    List<object> numbers = header.List("episodes"), steps = header.List("steps");
    attempts = 0;
    if (numbers.Count != steps.Count || frames.Count < 2 || frames[1].Count != numbers.Count * actionForm.Size) {
      Reject("actions of other sizes");
      return;
    }
    for (int row = 0; row < numbers.Count; row++) {
      Episode episode = FindWaiting(numbers[row], steps[row]);
      if (episode == null) continue;
      double[] values = actionForm.Unpack(frames[1].Array, frames[1].Offset + row * actionForm.Size);
      episode.Agent.Action = new AgentAction { Values = Cut(values), Version = header.Integer("version") };
      Release(episode, true);
    }
    foreach (var row in header.List("refused").OfType<Map>()) {
      Episode episode = FindWaiting(row.Get("episode"), row.Get("step"));
      if (episode != null) Refuse(episode, row.Text("reason"), row.Text("detail"));
    }
    foreach (object number in header.List("ended"))
      if (episodes.TryGetValue(Json.ToInteger(number), out Episode episode)) Release(episode, false);
  }

  Map recorded;   // of a replay
  Agent replays;  // the agent that plays it

  /// Answer with the actions of the recorded episode.
  void Replay() {
    if (!IsConnected) {
      recorded = File.Exists(options.Replay) ? Json.Parse(File.ReadAllText(options.Replay)) as Map : null;
      if (recorded == null || recorded.Text("kind") != "episode" || recorded.Number("format") != 1
          || !actionForm.Read(recorded.Map("spec").Map("action"))) {
        Finish(new ShoalException("no_episode", options.Replay + " is not of `shoal episodes RUN --export NAME`"));
        return;
      }
      phase = Phase.Joined; Apply(recorded.Integer("settings_version"), recorded.Map("settings"));
    }
    List<object> rows = recorded.List("observations"), actions = recorded.List("actions");
    foreach (Episode episode in episodes.Values.Where(each => each.Waits).ToList()) {
      Agent agent = episode.Agent;
      replays = replays ?? agent;
      if (agent != replays) { Finish(new ShoalException("no_episode", "it is of one agent", agent.Number)); return; }
      int step = (int)episode.Step;
      var row = step < rows.Count ? ((List<object>)rows[step]).Select(Json.ToNumber) : new double[0];
      var shown = episode.Observation.Cast<object>().Select(Convert.ToDouble);
      bool isSame = row.Count() == episode.Observation.Length
          && row.Zip(shown, (a, b) => Math.Abs(a - b) <= 1e-5 * Math.Max(1, Math.Abs(a))).All(each => each);
      if (!isSame && DivergedAt < 0) DivergedAt = step;
      if (episode.IsEnding || step >= actions.Count) { Finish(); return; }
      var items = actions[step] as List<object> ?? new List<object> { actions[step] };
      agent.Action = new AgentAction { Values = Cut(items.Select(Json.ToNumber).ToArray()) };
      Release(episode, true);
    }
  }
}

/// One WebSocket connection, of the platform's client. Nothing waits but Wait.
sealed class Connection {
  const int MaxReceivedBytes = 64 << 20;  // of one message
  readonly ClientWebSocket socket = new ClientWebSocket();
  readonly byte[] buffer = new byte[1 << 16];
  readonly MemoryStream message = new MemoryStream();
  readonly Queue<byte[]> unsent = new Queue<byte[]>();
  readonly Task connecting;
  Task sending;
  Task<WebSocketReceiveResult> receiving;
  /// Why it is lost; with a code, if another attempt is useless.
  public ShoalException Lost { get; private set; }
  public bool IsOpen => connecting.Status == TaskStatus.RanToCompletion && Lost == null;

  public Connection(string address) {
    try { connecting = socket.ConnectAsync(new Uri(address), CancellationToken.None); }
    catch (Exception error) when (error is UriFormatException || error is ArgumentException) {
      Lost = new ShoalException("rejected", address + ": " + error.Message);
      connecting = Task.FromResult(0);
    }
  }

  public void Send(byte[] bytes) { unsent.Enqueue(bytes); SendNext(); }

  void SendNext() {
    while (IsOpen && unsent.Count > 0 && (sending == null || sending.IsCompleted))
      Attempt(() => {
        var bytes = new ArraySegment<byte>(unsent.Dequeue());
        sending = socket.SendAsync(bytes, WebSocketMessageType.Binary, true, CancellationToken.None);
      });
  }

  /// A message that has come, or null.
  public byte[] Receive() {
    if (connecting.IsFaulted || connecting.IsCanceled) Lose(connecting.Exception);
    if (sending != null && sending.IsFaulted) Lose(sending.Exception);
    SendNext();
    while (IsOpen) {
      if (receiving == null)
        Attempt(() => receiving = socket.ReceiveAsync(new ArraySegment<byte>(buffer), CancellationToken.None));
      if (receiving == null || !receiving.IsCompleted) return null;
      if (receiving.Status != TaskStatus.RanToCompletion) { Lose(receiving.Exception); return null; }
      WebSocketReceiveResult part = receiving.Result;
      receiving = null;
      message.Write(buffer, 0, part.Count);
      if (part.MessageType == WebSocketMessageType.Close)
        Lost = new ShoalException(part.CloseStatus == WebSocketCloseStatus.MessageTooBig ? "too_large" : "",
                                  "closed: " + part.CloseStatus + " " + part.CloseStatusDescription);
      else if (message.Length > MaxReceivedBytes)
        Lost = new ShoalException("malformed", "a message beyond " + MaxReceivedBytes + " bytes");
      else if (part.EndOfMessage) {
        byte[] whole = message.ToArray();
        message.SetLength(0);
        return whole;
      }
    }
    return null;
  }

  public void Wait(int milliseconds) {
    Task awaited = !connecting.IsCompleted ? connecting : receiving;
    if (awaited == null || Lost != null) Thread.Sleep(1);
    else Task.WaitAny(new[] { awaited }, milliseconds);
  }

  public void Close() {
    if (IsOpen && sending != null) Task.WaitAny(new[] { sending }, 200);
    if (!IsOpen) return;
    Attempt(() => Task.WaitAny(
        new[] { socket.CloseOutputAsync(WebSocketCloseStatus.NormalClosure, "", CancellationToken.None) }, 200));
  }

  public void Abort() => socket.Dispose();

  void Attempt(System.Action call) {
    try { call(); }
    catch (WebSocketException error) { Lose(error); }
    catch (InvalidOperationException error) { Lose(error); }
    catch (IOException error) { Lose(error); }
  }

  void Lose(Exception error) {
    string text = error == null ? "canceled" : "";
    for (; error != null; error = error.InnerException)
      if (!(error is AggregateException)) text += (text == "" ? "" : ": ") + error.Message;
    bool isRejected = Regex.IsMatch(text, @"\b4\d\d\b");  // the platform tells the status of HTTP in words alone
    Lost = Lost ?? new ShoalException(isRejected ? "rejected" : "", text);
  }
}

/// The dtype and the size of a tensor. This client has no float16.
sealed class TensorForm {
  static readonly Dictionary<string, Type> Types = new Dictionary<string, Type> {
    { "float32", typeof(float) }, { "float64", typeof(double) }, { "bool", typeof(bool) }, { "int8", typeof(sbyte) },
    { "int16", typeof(short) }, { "int32", typeof(int) }, { "int64", typeof(long) }, { "uint8", typeof(byte) },
    { "uint16", typeof(ushort) }, { "uint32", typeof(uint) }, { "uint64", typeof(ulong) } };
  public int Count = 1;
  public string Dtype = "float32";
  public bool IsScalar = true;
  public int Size => Count * Buffer.ByteLength(Array.CreateInstance(Types[Dtype], 1));
  public string Index = "";  // of the number that was not packed

  public bool Read(Map tensor) {
    Dtype = tensor.Text("dtype");
    IsScalar = tensor.List("shape").Count == 0;
    double count = tensor.List("shape").Aggregate(1.0, (product, each) => product * Json.ToNumber(each));
    Count = count >= 1 && count <= 1 << 26 ? (int)count : 0;
    return Types.ContainsKey(Dtype) && Count > 0;
  }

  /// What is wrong with the values, or null.
  public string Pack(Array values, out byte[] bytes) {
    Array converted = values;
    bytes = null; Index = "";
    if (values.Length != Count) return values.Length + " numbers, expected " + Count;
    if (values.GetType().GetElementType() != Types[Dtype]) {
      converted = Array.CreateInstance(Types[Dtype], Count);
      int at = 0;
      foreach (object each in values) {
        double number = Convert.ToDouble(each);
        bool fits = Dtype.StartsWith("float") || number == Math.Floor(number);
        try { if (fits) converted.SetValue(Convert.ChangeType(number, Types[Dtype]), at); }
        catch (OverflowException) { fits = false; }
        if (!fits) { Index = "[" + at + "]"; return Json.Format(number) + " is no " + Dtype; }
        at++;
      }
    }
    bytes = new byte[Size];
    Buffer.BlockCopy(converted, 0, bytes, 0, Size);
    return null;
  }

  public double[] Unpack(byte[] bytes, int offset) {
    Array values = Array.CreateInstance(Types[Dtype], Count);
    Buffer.BlockCopy(bytes, offset, values, 0, Size);
    return values.Cast<object>().Select(each => Convert.ToDouble(each)).ToArray();
  }
}

/// JSON as dictionaries, lists, strings, doubles, bools and null; what is not there, or of another type, is empty or 0.
static class Json {
  public static object Get(this Map from, string name) => from.TryGetValue(name, out object value) ? value : null;
  public static string Text(this Map from, string name) => from.Get(name) as string ?? "";
  public static double Number(this Map from, string name) => ToNumber(from.Get(name));
  public static long Integer(this Map from, string name) => ToInteger(from.Get(name) ?? 0.0);
  public static List<object> List(this Map from, string name) => from.Get(name) as List<object> ?? new List<object>();
  public static Map Map(this Map from, string name) => from.Get(name) as Map ?? new Map();
  public static double ToNumber(object value) => value is double ? (double)value : value is bool && (bool)value ? 1 : 0;
  public static long ToInteger(object value) {
    return value is double && Math.Abs((double)value) < 9e15 ? (long)(double)value : -1;
  }
  public static string Format(double value) {
    bool isInteger = Math.Abs(value) < 9e15 && value == Math.Floor(value);
    return value.ToString(isInteger ? "F0" : "R", CultureInfo.InvariantCulture);
  }
  public static string Quote(string text) =>
      "\"" + Regex.Replace(text, "[\\x00-\\x1f\"\\\\]", each => "\\u" + ((int)each.Value[0]).ToString("x4")) + "\"";

  static readonly Regex Token = new Regex(
      "\\G\\s*(\"[^\"\\\\]*(?:\\\\.[^\"\\\\]*)*\"|-?\\d+(?:\\.\\d+)?(?:[eE][+-]?\\d+)?|true|false|null|[{}\\[\\],:])");

  /// Null for what is no JSON.
  public static object Parse(string text) {
    int at = 0;
    return Read(text, ref at, 0, out object value) && text.Substring(at).Trim() == "" ? value : null;
  }

  static bool Read(string text, ref int at, int depth, out object value) {
    string word = Next(text, ref at);
    value = word == "true" ? true : word == "false" ? false : (object)null;
    if (depth > 64 || word == "") return false;
    if (value != null || word == "null") return true;
    if (word[0] == '"') {
      word = word.Substring(1, word.Length - 2);
      value = Regex.Replace(word, @"\\(u[0-9a-fA-F]{4}|.)", each => Unescape(each.Groups[1].Value));
      return true;
    }
    bool isMap = word == "{";
    bool isNumber = double.TryParse(word, NumberStyles.Float, CultureInfo.InvariantCulture, out double number);
    if (isNumber || !isMap && word != "[") { value = number; return isNumber; }
    var map = new Map();
    var list = new List<object>();
    value = isMap ? (object)map : list;
    for (string closing = isMap ? "}" : "]"; ;) {
      int first = at;
      string next = Next(text, ref at);
      if (next == closing && map.Count + list.Count == 0) return true;
      at = first;
      if (isMap && !Read(text, ref at, depth + 1, out value)) return false;
      string name = value as string;
      if (isMap && (name == null || Next(text, ref at) != ":")) return false;
      if (!Read(text, ref at, depth + 1, out object item)) return false;
      if (isMap) map[name] = item; else list.Add(item);
      value = isMap ? (object)map : list;
      next = Next(text, ref at);
      if (next != ",") return next == closing;
    }
  }

  static string Next(string text, ref int at) {
    Match token = Token.Match(text, at);
    at += token.Length;
    return token.Groups[1].Value;
  }

  static string Unescape(string escape) {
    if (escape[0] == 'u' && escape.Length == 5) return ((char)Convert.ToInt32(escape.Substring(1), 16)).ToString();
    int at = "bfnrt".IndexOf(escape[0]);
    return at < 0 ? escape : "\b\f\n\r\t"[at].ToString();
  }
}
}
