// The page of one run, or of several over each other, with its data inside: a report, which asks no server.
import { stored } from "./lib/api.js";
import * as compare from "./pages/compare.js";
import * as run from "./pages/run.js";

const { runs } = stored;
(runs.length > 1 ? compare : run).open(document.getElementById("main"), runs);
