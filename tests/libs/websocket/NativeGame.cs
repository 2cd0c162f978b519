// Catch, or with the address `-` first a game that does what lines of stdin say: one Run after the other.
using System;
using System.Globalization;
using System.Linq;
using Shoal;

static class NativeGame {
  static Array ReadNumbers(string[] words, int at) {
    if (words.Length <= at) return null;
    object[] each = words[at].Split(',').Select(ReadNumber).ToArray();
    return each.All(one => one is double) ? (Array)each.Cast<double>().ToArray() : each;
  }

  static object ReadNumber(string word) {
    bool isNumber = double.TryParse(word, NumberStyles.Float, CultureInfo.InvariantCulture, out double number);
    return isNumber ? number : word == "null" ? null : (object)word;
  }

  static void Obey(Run run, string[] words) {
    int agent = words.Length > 1 ? int.Parse(words[1]) : 0;
    float reward = words.Length > 3 ? (float)double.Parse(words[2], CultureInfo.InvariantCulture) : 0;
    if (words[0] == "wait") run.Wait();
    else if (words[0] == "connect") run.Connect();
    else if (words[0] == "leave") run.Dispose();
    else if (words[0] == "take") run.TakeOver(agent, ReadNumbers(words, 2));
    else if (words[0] == "ask") run.Ask(agent, ReadNumbers(words, 3), reward, ReadNumbers(words, 4));
    else if (words[0] == "end") {
      int how = int.Parse(words[3]);
      run.End(agent, ReadNumbers(words, 4), reward, (End)(how & 3), how < 4 ? (bool?)null : how >= 12, ReadNumbers(words, 5));
    } else {
      var values = run.ActionOf(agent).Values.Select(each => each.ToString(CultureInfo.InvariantCulture));
      Console.WriteLine("action " + string.Join(" ", values) + " of " + run.ActionOf(agent).Version + (run.IsOver ? ", over" : "")
          + (run.DivergedAt >= 0 ? ", another game from step " + run.DivergedAt : ""));
    }
  }

  static int Main(string[] arguments) {
    if (arguments[0] != "-") return Catch.Main(arguments);
    Run run = null;
    for (string line; (line = Console.ReadLine()) != null;) {
      string[] words = line.Split(' ');
      try {
        bool plays = words[0] == "play";
        if (words[0] != "join" && !plays) { Obey(run, words); continue; }
        run?.Dispose();
        run = new Run(words[1], plays ? Environment.GetEnvironmentVariable("SHOAL_TOKEN") : "a \"token\"", "game", new Options { Replay = words[1].EndsWith(".json") ? words[1] : "",
          GiveUpSeconds = words.Length > 2 ? double.Parse(words[2], CultureInfo.InvariantCulture) : 0, Behaviour = plays ? "" : "human", Offers = plays ? Environment.GetEnvironmentVariable("OFFERS") ?? "" : "{\"action\":{\"dtype\":\"int64\"}}",
          OnSettings = values => Console.WriteLine("gravity " + string.Join(" ", values.Values.Select(each => Convert.ToString(each, CultureInfo.InvariantCulture)))) });
      } catch (ShoalException error) {
        Console.WriteLine("error " + error.Code + " " + error.Agent + " " + error.Message);
      }
    }
    return 0;
  }
}
