// Drive.exe DECISIONS FOLDER...: of each exported folder the largest difference from its vectors (as vectors.txt has
// them), and the microseconds of a decision.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.IO;
using System.Linq;

static class Drive {
  static void Main(string[] arguments) {
    CultureInfo.CurrentCulture = new CultureInfo("de-DE"); // whose decimal point is a comma
    int decisions = int.Parse(arguments[0]);
    foreach (string folder in arguments.Skip(1)) {
      var policy = new Shoal.Policy(File.ReadAllText(folder + "/policy.json")).Copy();
      double largest = 0;
      float[] observation = null;
      bool[] mask = null;
      foreach (string line in File.ReadLines(folder + "/vectors.txt")) {
        var numbers = new Queue<float>(line.Split(' ').Select(each => float.Parse(each, CultureInfo.InvariantCulture)));
        Func<float[]> read = () => Enumerable.Range(0, (int)numbers.Dequeue()).Select(_ => numbers.Dequeue()).ToArray();
        bool reset = numbers.Dequeue() == 1;
        observation = read();
        mask = read().Select(each => each == 1).ToArray();
        float[] state = read(), wanted = read(), spans = read(), best = read(), sampled = read(), uniforms = read();
        foreach (bool isSampled in new[] { false, true }) {
          int drawn = 0;
          policy.Reset();
          if (!reset) policy.State = (float[])state.Clone();
          policy.Sampled = isSampled;
          policy.Random = () => uniforms[drawn++];
          float[] found = policy.Act(observation, mask).Concat(policy.Outputs).Concat(policy.State).ToArray();
          float[] expected = (isSampled ? sampled : best).Concat(wanted).ToArray();
          for (int i = 0; i < Math.Max(found.Length, expected.Length); i++) {
            double scale = Math.Max(Math.Max(1, Math.Abs(expected[i])), i < spans.Length ? spans[i] : 0);
            largest = Math.Max(largest, Math.Abs(found[i] - expected[i]) / scale);
          }
        }
      }
      policy.Sampled = false;
      var watch = Stopwatch.StartNew();
      for (int i = 0; i < decisions; i++) policy.Act(observation, mask);
      double taken = 1000.0 * watch.Elapsed.TotalMilliseconds / Math.Max(1, decisions);
      Console.WriteLine(string.Format(CultureInfo.InvariantCulture, "{0:F9} {1:F3}", largest, taken));
    }
  }
}
