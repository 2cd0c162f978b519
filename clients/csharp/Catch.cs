// Catch: apples fall down a field of five columns and six rows, and a basket below moves left, stays, or moves right.
// An episode is five apples; each that is caught gives 1, each that is missed -1.
//
//     mcs Catch.cs Shoal.cs && SHOAL_TOKEN=... mono Catch.exe ws://127.0.0.1:8765 [games]
using System;
using Shoal;

sealed class Catch {
  static readonly Random Random = new Random();
  int basket = 2, apples, column = Random.Next(5), row;

  public bool IsOver => apples == 5;

  /// Basket, apple's column and row in [-1, 1], and how far the apple is to the right.
  public float[] Observe() => new[] { basket / 2f - 1, column / 2f - 1, row / 2.5f - 1, (column - basket) / 4f };

  public float Step(int action) {
    basket = Math.Min(4, Math.Max(0, basket + action - 1));
    if (++row < 5) return 0;
    float reward = column == basket ? 1 : -1;
    apples++; column = Random.Next(5); row = 0;
    return reward;
  }

  static void Play(Run run) {
    var game = new Catch();
    for (float reward = 0; !run.IsOver;) {
      reward = game.Step(run.Act(0, game.Observe(), reward));
      if (!game.IsOver) continue;
      run.End(0, game.Observe(), reward);
      game = new Catch();
    }
  }

  /// Several games side by side: what they ask travels as one message, and so do the actions.
  static void PlayMany(Run run, int count) {
    var games = new Catch[count];
    for (int i = 0; i < count; i++) run.Ask(i, (games[i] = new Catch()).Observe());
    for (run.Wait(); !run.IsOver; run.Wait())
      for (int i = 0; i < count; i++) {
        float reward = games[i].Step(run.ActionOf(i));
        if (games[i].IsOver) { run.End(i, games[i].Observe(), reward); games[i] = new Catch(); }
        run.Ask(i, games[i].Observe(), reward);
      }
  }

  public static int Main(string[] arguments) {
    try {
      var options = new Options { Offers = "{\"name\": \"catch\", \"observation\": [4], \"action\": 3}" };
      string token = Environment.GetEnvironmentVariable("SHOAL_TOKEN");
      using (var run = new Run(arguments[0].Split(','), token, "catch-cs", options)) {
        if (arguments.Length > 1) PlayMany(run, int.Parse(arguments[1])); else Play(run);
        Console.WriteLine("the run is over");
      }
      return 0;
    } catch (ShoalException error) {
      Console.Error.WriteLine(error.Message);
      return 1;
    }
  }
}
