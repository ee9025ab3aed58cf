// Makes a player of every .mk-player on the page that is none yet. Its frames lie in its own JSON,
// so neither kernel nor network is asked; where scripts do not run, the picture inside it stays.
for (const root of document.querySelectorAll(".mk-player")) {
  if (root.mkPlayer) continue;
  root.mkPlayer = true;
  const { name, milliseconds, width, height, base, frames } = JSON.parse(
    root.querySelector("script[type='application/json']").textContent);
  const last = frames.length - 1;
  const stage = root.querySelector(".mk-stage");
  stage.innerHTML = `
    <div class="mk-frame"><img width="${width}" height="${height}"><img alt=""></div>
    <div class="mk-bar"><button type="button"></button>
      <button type="button" aria-label="previous">\u2039</button>
      <button type="button" aria-label="next">\u203a</button>
      <input type="range" min="0" max="${last}"><output aria-hidden="true"></output></div>
    <p class="mk-said" aria-live="polite"></p>`;
  const [ground, over] = stage.querySelectorAll("img");
  const [play, previous, next] = stage.querySelectorAll("button");
  const [slider, label, said] = ["input", "output", ".mk-said"].map((s) => stage.querySelector(s));
  let at = 0, timer = null;

  ground.src = base;
  slider.setAttribute("aria-label", name);
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", `${name}. Arrow keys, Home, End choose a picture, space plays.`);
  root.tabIndex = 0;

  function show(index) {
    at = Math.max(0, Math.min(last, index));
    const [title, alt, changed] = frames[at];
    over.style.display = changed ? "block" : "none";
    if (changed) over.src = changed;
    ground.alt = alt;
    slider.value = at;
    slider.setAttribute("aria-valuetext", title);
    label.textContent = `${title} (${at + 1} of ${last + 1})`;
    const quiet = timer !== null || !root.contains(document.activeElement);
    if (!quiet) said.textContent = alt;
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "\u25b6\ufe0e";
    play.setAttribute("aria-label", "play");
  }
  function tick() {
    if (!root.isConnected || at === last) pause();
    else if (at + 1 === last) pause(), show(last);
    else show(at + 1);
  }
  function toggle() {
    if (timer !== null) return pause(), show(at);
    timer = setInterval(tick, milliseconds);
    play.textContent = "\u23f8\ufe0e";
    play.setAttribute("aria-label", "pause");
    show(at === last ? 0 : at);
  }
  const go = (index) => { pause(); show(index); };
  play.onclick = toggle;
  previous.onclick = () => go(at - 1);
  next.onclick = () => go(at + 1);
  slider.oninput = () => go(Number(slider.value));

  // JupyterLab takes keys at the document before they come here. In an element with this attribute
  // it takes none; the window comes earlier still, and leaves Ctrl+S and Shift+Enter to the page.
  const theirs = (e) => e.ctrlKey || e.metaKey || e.altKey || (e.shiftKey && e.key === "Enter");
  const guard = (e) => root.toggleAttribute("data-lm-suppress-shortcuts", !theirs(e));
  root.addEventListener("focusin", () => window.addEventListener("keydown", guard, true));
  root.addEventListener("focusout", () => window.removeEventListener("keydown", guard, true));
  root.addEventListener("keydown", (e) => {
    if (theirs(e)) return;
    e.stopPropagation();
    const page = Math.ceil(frames.length / 10);
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - page, PageUp: at + page, Home: 0, End: last }[e.key];
    if (to !== undefined) go(to);
    else if (e.key === " " && e.target.tagName !== "BUTTON") toggle();
    else if (e.key === "Escape") root.parentElement.closest("[tabindex]")?.focus();
    else return;
    e.preventDefault();
  });
  pause();
  show(0);
}
