// Values under the pointer. Without it the page is complete, only still.
for (const figure of document.querySelectorAll(".chart")) {
  figure.querySelector("button")?.addEventListener("click", () => figure.classList.toggle("log"));
  for (const svg of figure.querySelectorAll("svg")) follow(figure, svg);
}

function follow(figure, svg) {
  const tip = figure.querySelector(".tip"), cursor = svg.querySelector(".cursor");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [left, right, low, high] = svg.dataset.x.split(" ").map(Number);
  const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(5)));
  // The point at x: nearest, or on stairs the last that is not beyond.
  const find = (series, x) => {
    let from = 0, to = series.x.length - 1;
    while (from < to) {
      const middle = (from + to + 1) >> 1;
      if (series.x[middle] <= x) from = middle; else to = middle - 1;
    }
    const next = from + 1;
    return !series.stairs && next < series.x.length && series.x[next] - x < x - series.x[from] ? next : from;
  };
  const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = low + ((event.clientX - box.left) * scale - left) / (right - left) * (high - low);
    const shown = data.series.filter(series => !series.hidden);
    const at = shown[0].x[find(shown[0], x)];
    const place = left + (at - low) / (high - low) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    tip.replaceChildren(document.createTextNode(`${data.x} ${number(at)}`));
    for (const series of shown) {
      const index = find(series, at), row = document.createElement("div"), mark = document.createElement("i");
      if (!series.stairs && series.x[index] !== at) continue;
      mark.className = `b${series.colour}`;
      row.append(mark, `${shown.length > 1 ? series.label + " " : ""}${number(series.y[index])}`);
      tip.append(row);
    }
    const beside = place / scale + figure.clientWidth - box.width;
    tip.style.top = "44px";
    tip.style.left = place > (left + right) / 2 ? "auto" : `${beside}px`;
    tip.style.right = place > (left + right) / 2 ? `${figure.clientWidth - place / scale}px` : "auto";
    tip.style.visibility = cursor.style.visibility = "visible";
  });
}
