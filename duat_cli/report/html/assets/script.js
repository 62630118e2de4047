"use strict";
(() => {
  // -- the reports: deflated; first the doubles, byte by byte over all of them, then JSON with \1 in their places --
  const unpack = async () => {
    const held = document.getElementById("reports");
    const packed = Uint8Array.from(atob(held.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const count = Number(held.dataset.doubles);
    const one = new DataView(new ArrayBuffer(8));
    let at = 0;
    const next = () => {
      for (let k = 0; k < 8; k++) one.setUint8(k, bytes[k * count + at]);
      at += 1;
      return String(one.getFloat64(0, true));
    };
    return JSON.parse(new TextDecoder().decode(bytes.subarray(8 * count)).replaceAll("\u0001", next));
  };
  let unpacked;
  const reports = () => (unpacked ??= unpack());
  const failed = (error) => `The report in this page cannot be unpacked: ${error.message}`;

  // Elements are built from text nodes alone: no string of a report is ever parsed as markup.
  const make = (name, attributes = {}, ...content) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  };
  // Controls, formats and the like are written as their code, as on the rest of the page.
  const shown = (text) =>
    [...text].map((c) => (/[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/u.test(c) ? `\\u{${c.codePointAt(0).toString(16)}}` : c)).join("");
  const number = (value) => (value === 0 ? "0" : Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(3))));

  // -- colours ----------------------------------------------------------------------------------------------
  const theme = document.getElementById("theme");
  const redraws = [];
  theme.parentElement.hidden = false;
  theme.addEventListener("change", () => {
    if (theme.value) document.documentElement.dataset.theme = theme.value;
    else delete document.documentElement.dataset.theme;
    redraws.forEach((draw) => draw());
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"])
    matchMedia(query).addEventListener("change", () => redraws.forEach((draw) => draw()));

  // -- printing: what is folded is printed as well, but for tables that are made when they are opened --------
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open]):not(.made)")];
    folded.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => folded.forEach((one) => (one.open = false)));

  // -- saving: what `duat report` reads again ------------------------------------------------------------------
  document.querySelectorAll(".save").forEach((root) => {
    const [button, out] = root.children;
    root.hidden = false;
    button.addEventListener("click", async () => {
      try {
        const { report } = (await reports())[Number(root.closest("[data-report]").dataset.report)];
        const url = URL.createObjectURL(new Blob([JSON.stringify(report, null, 2)], { type: "application/json" }));
        make("a", { href: url, download: button.dataset.name }).click();
        URL.revokeObjectURL(url);
        out.textContent = "";
      } catch (error) {
        out.textContent = failed(error);
      }
    });
  });

  // -- maps: one prompt's C, block by block ------------------------------------------------------------------
  const choice = (id, label, options) => {
    const select = make("select", { id });
    options.forEach(([value, text]) => select.append(make("option", { value }, text)));
    return [make("span", {}, make("label", { for: id }, label), " ", select), select];
  };
  const rgb = (element) => getComputedStyle(element).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);

  document.querySelectorAll(".map").forEach(async (root, place) => {
    const note = (text) => root.replaceChildren(make("p", { class: "note" }, text));
    let maps;
    try {
      const { report } = (await reports())[Number(root.closest("figure").dataset.report)];
      maps = (report.maps || []).filter((map) => map.blocks && map.blocks.length);
    } catch (error) {
      return note(failed(error));
    }
    if (!maps.length) return note("The maps are not on this page: no block has one, or they were too large.");
    root.textContent = "";
    const id = `map${place}`;
    const [promptSpan, prompts] = choice(`${id}-prompt`, "Prompt", maps.map((map, i) => [i, `${map.prompt}: ${shown(map.tokens.slice(0, 6).join(""))}…`]));
    const [blockSpan, blocks] = choice(`${id}-block`, "Block", []);
    const [scaleSpan, scales] = choice(`${id}-scale`, "Colours", [["log", "logarithmic"], ["linear", "linear"]]);
    const canvas = make("canvas", { tabindex: "0", role: "img", "aria-describedby": `${id}-out` });
    const out = make("output", { id: `${id}-out`, "aria-live": "polite" });
    const [low, high] = [make("span", { class: "end low" }), make("span", { class: "end high" })];
    const [least, most] = [make("span"), make("span")];
    const ramp = make("div", { class: "ramp" }, low, least, make("span", { class: "strip" }), most, high, " norm of W'");
    const table = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table: the map of the chosen block" });
    const details = make("details", { class: "made" }, make("summary", {}, "The numbers of this block"), table);
    const controls = make("div", { class: "controls" }, ...(maps.length > 1 ? [promptSpan] : []), blockSpan, scaleSpan);
    root.append(controls, make("div", { class: "lay" }, make("div", {}, canvas, ramp), out), details);

    let at = [0, 0]; // row (to), column (from)
    const map = () => maps[Number(prompts.value) || 0];
    const block = () => map().blocks[Number(blocks.value) || 0];
    const value = (i, j) => (block().coupling[i] || [])[j] || 0;

    const fill = () => {
      const kept = blocks.value;
      blocks.textContent = "";
      map().blocks.forEach((one, i) => blocks.append(make("option", { value: i }, String(one.index))));
      if (kept && kept < map().blocks.length) blocks.value = kept;
      at = [map().tokens.length - 1, 0];
    };

    const draw = () => {
      const count = map().tokens.length;
      const cell = Math.max(2, Math.min(24, Math.floor(640 / count)));
      canvas.width = canvas.height = count * cell;
      canvas.setAttribute("aria-label", `Coupling C of block ${block().index}, ${count} tokens; arrow keys move from cell to cell`);
      const known = block().coupling.flat().filter((v) => v > 0);
      const top = Math.max(...known, 0);
      const bottom = scales.value === "log" ? Math.max(Math.min(...known, top), top * 1e-4) : 0;
      const share = (v) =>
        v <= 0 || top === 0 ? 0 : scales.value === "log" ? (top === bottom ? 1 : Math.max(0.04, Math.log(v / bottom) / Math.log(top / bottom))) : v / top;
      least.textContent = scales.value === "log" ? `≤ ${number(bottom)}` : "0";
      most.textContent = number(top);
      const [from, to] = [rgb(low), rgb(high)];
      const pen = canvas.getContext("2d");
      for (let i = 0; i < count; i++)
        for (let j = 0; j < count; j++) {
          const s = share(value(i, j));
          pen.fillStyle = `rgb(${from.map((f, k) => Math.round(f + (to[k] - f) * s)).join(",")})`;
          pen.fillRect(j * cell, i * cell, cell, cell);
        }
      const [i, j] = at;
      pen.strokeStyle = getComputedStyle(canvas).color;
      pen.lineWidth = 2;
      pen.strokeRect(j * cell + 1, i * cell + 1, Math.max(2, cell - 2), Math.max(2, cell - 2));
      say();
      if (details.open) tabulate();
    };

    const token = (i) => make("bdi", {}, shown(map().tokens[i]));
    const say = () => {
      const [i, j] = at;
      out.replaceChildren(
        make("div", {}, `Block ${block().index}: from token ${j} `, token(j), ` to token ${i} `, token(i)),
        make("div", {}, make("strong", {}, `C = ${number(value(i, j))}`)),
        make("div", {}, `Strongest into token ${i}:`),
        make("ol", {}, ...strongest(i).map(([from, c]) => make("li", {}, `${number(c)} from ${from} `, token(from)))),
        make("div", {}, `Token ${i} and before: `, make("bdi", {}, shown(map().tokens.slice(Math.max(0, i - 12), i + 1).join("")))),
      );
    };

    const strongest = (i) =>
      (block().coupling[i] || [])
        .map((c, from) => [from, c])
        .sort((a, b) => b[1] - a[1])
        .slice(0, 5);

    const tabulate = () => {
      const head = make("tr", {}, make("th", { scope: "col" }, "to \\ from"));
      map().tokens.forEach((text, j) => head.append(make("th", { scope: "col" }, `${j} `, make("bdi", {}, shown(text)))));
      const body = make("tbody");
      map().tokens.forEach((text, i) => {
        const row = make("tr", {}, make("th", { scope: "row" }, `${i} `, make("bdi", {}, shown(text))));
        map().tokens.forEach((_, j) => row.append(make("td", {}, number(value(i, j)))));
        body.append(row);
      });
      table.replaceChildren(make("table", {}, make("thead", {}, head), body));
    };

    const go = (i, j) => {
      const last = map().tokens.length - 1;
      at = [Math.min(last, Math.max(0, i)), Math.min(last, Math.max(0, j))];
      draw();
    };
    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      const count = map().tokens.length;
      return [Math.floor(((event.clientY - box.top) / box.height) * count), Math.floor(((event.clientX - box.left) / box.width) * count)];
    };
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      go(at[0] + move[0], at[1] + move[1]);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [i, j] = under(event);
      if (i !== at[0] || j !== at[1]) go(i, j);
    });
    prompts.addEventListener("change", () => { fill(); draw(); });
    blocks.addEventListener("change", draw);
    scales.addEventListener("change", draw);
    blocks.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      blocks.selectedIndex = Math.min(blocks.length - 1, Math.max(0, blocks.selectedIndex + step));
      draw();
    });
    details.addEventListener("toggle", () => details.open && tabulate());
    redraws.push(draw);
    fill();
    draw();
  });
})();
